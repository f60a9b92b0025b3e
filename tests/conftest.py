"""What every test starts from."""

import os

import torch

# Triton reads this when a kernel is defined. Without a GPU the interpreter runs the same kernels on CPU tensors.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest


@pytest.fixture(autouse=True)
def seed() -> None:
    """Seed torch, so that a test's random weights and prompts do not depend on the tests before it."""
    torch.manual_seed(0)
