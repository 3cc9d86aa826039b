"""Everything in this folder needs a CUDA device; without one it is skipped and says so."""

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items):
    reason = "no GPU: torch.cuda is unavailable in this process"
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _fresh_device_memory():
    """Each test leaves the pool to the next one; an asynchronous fault belongs to its own test."""
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
