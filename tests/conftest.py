"""What every test shares: one torch thread, and no network."""

import os

import pytest
import torch

# Before transformers is imported: a test that reaches for a hub must fail at once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "disabled")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """OpenMP with several threads collapses when another process holds a core."""
    torch.set_num_threads(1)
