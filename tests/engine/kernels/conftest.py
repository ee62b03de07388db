"""The kernels run in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where tensors lie: the same tests are those of a GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
