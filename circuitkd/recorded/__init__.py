"""Recorded results of published work, and measuring them again."""
