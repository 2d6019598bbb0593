"""Teachers and students that people ask about, and what their weights need."""

from dataclasses import dataclass

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MILLION = 1_000_000
# Beside the weights: the libraries, and a batch of activations. Measured on SmolLM2: 1.2 GB.
_BESIDE_WEIGHTS = 1_500_000_000


@dataclass(frozen=True)
class Pair:
    """A teacher and a student on the hub, with a task that both are posed.

    ``teacher_millions`` and ``student_millions`` count parameters, tied ones once.
    """

    teacher: str
    student: str
    teacher_millions: int
    student_millions: int
    task: str
    dtype: str = "float32"

    @property
    def command(self) -> str:
        """What compares the two."""
        words = ["circuitkd score", f"--teacher {self.teacher}", f"--student {self.student}"]
        words.append(f"--task {self.task}")
        if self.dtype != "float32":
            words.append(f"--dtype {self.dtype} --device cuda")
        return " ".join(words)

    @property
    def weight_bytes(self) -> int:
        """The weights of both models, which are in memory together.

        >>> Pair("t", "s", 100, 50, "ioi").weight_bytes
        600000000
        """
        return (self.teacher_millions + self.student_millions) * _MILLION * BYTES[self.dtype]

    @property
    def bytes_needed(self) -> int:
        """The weights, and what a run needs beside them, roughly."""
        return self.weight_bytes + _BESIDE_WEIGHTS


_MINITRON = "nvidia/Llama-3.1-Minitron-4B"
HUB_PAIRS: tuple[Pair, ...] = (
    Pair("gpt2", "distilgpt2", 124, 82, "numerals"),
    Pair("bert-base-uncased", "distilbert-base-uncased", 110, 67, "numerals"),
    Pair("EleutherAI/pythia-410m", "EleutherAI/pythia-160m", 405, 162, "ioi"),
    Pair("EleutherAI/pythia-1.4b", "EleutherAI/pythia-410m", 1415, 405, "ioi", "bfloat16"),
    Pair("Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-0.5B", 1544, 494, "ioi", "bfloat16"),
    Pair("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-1.5B", 7616, 1544, "ioi", "bfloat16"),
    Pair("meta-llama/Llama-3.1-8B", f"{_MINITRON}-Depth-Base", 8030, 4540, "numerals", "bfloat16"),
    Pair("meta-llama/Llama-3.1-8B", f"{_MINITRON}-Width-Base", 8030, 4510, "numerals", "bfloat16"),
)
