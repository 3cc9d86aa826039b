"""Paths, skips and the order of the whole suite."""

import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))
# Problems here are small: more threads only wait for each other where cores are shared. So too in
# the processes that tests start.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
# --hypothesis-profile=check: a quarter of the examples, for an answer within minutes.
settings.register_profile("check", max_examples=25)


def pytest_collection_modifyitems(items):
    """Files with engines and other long tests first: where files are spread over processes, the
    longest must not be the last to start."""
    marks = ("engine", "slow", "long")
    first = {item.path for item in items if any(map(item.get_closest_marker, marks))}
    items.sort(key=lambda item: item.path not in first)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.fixture
def compiled_once(monkeypatch):
    """Triton's cache in the checkout, for tests that look at what it compiles kernels to: it knows
    them by their sources and options."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(ROOT / "build" / "triton"))


@pytest.fixture
def no_home(monkeypatch):
    """A user without HOME and without an entry in the user database."""

    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
