"""Tests that need a GPU: `make gpu-test`."""

import pytest
import torch


def pytest_sessionstart(session: pytest.Session) -> None:
    if not torch.cuda.is_available():
        pytest.exit("these tests need a CUDA device and a CUDA build of torch", returncode=2)
