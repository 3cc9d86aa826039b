"""Everything in this folder needs a CUDA device."""

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items):
    """The conftest above skips what is marked so where there is no GPU."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def _fresh_device_memory():
    """Each test leaves the pool to the next one; an asynchronous fault belongs to its own test."""
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
