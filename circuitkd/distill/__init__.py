"""MAKING students, to study what distillation transfers."""
