"""What a server allocates at start, and what it refuses to."""

import os

import pytest
import torch

from sgl_prefix_attn.engine.build import build
from sgl_prefix_attn.records import FLASHINFER, HeadConfig
from sgl_prefix_attn.settings import Settings
from tests.support.forests import nested_paths
from tests.support.parallel import model_runner

RUNNER = model_runner(max_batch=48, max_tokens=4096)


def test_the_planner_keeps_within_what_is_allocated():
    built = build(RUNNER, HeadConfig(48, 1, 64), Settings(), FLASHINFER)
    plan = built.planner.plan(nested_paths(48, 40))
    assert built.executor.capacity.covers(plan)
    # One that splits every node off would not fit.
    naive = build(RUNNER, HeadConfig(48, 1, 64), Settings(strategy="naive"), FLASHINFER).planner
    assert not built.executor.capacity.covers(naive.plan(nested_paths(48, 40)))


@pytest.mark.parametrize("headroom", [10**9, 10**8])
def test_a_headroom_beyond_the_memory_is_named_with_its_bytes(headroom):
    with pytest.raises(ValueError) as error:
        build(RUNNER, HeadConfig(8, 2, 64), Settings(headroom=headroom), FLASHINFER)
    assert f"PREFIX_ATTN_HEADROOM={headroom} takes {8 * 48 * headroom:,} bytes" in str(error)
    assert "lower it, or --max-running-requests" in str(error)


def test_on_a_gpu_it_is_the_free_memory_that_counts(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**6, 10**9))
    with pytest.raises(ValueError, match="takes 3,840,000 bytes .* where 1,000,000 are possible"):
        build(
            model_runner("cuda", max_batch=48),
            HeadConfig(8, 2, 64),
            Settings(headroom=10**4),
            FLASHINFER,
        )


@pytest.mark.parametrize("deterministic", [False, True])
def test_plans_beyond_the_memory_are_named_with_their_bytes(deterministic, monkeypatch):
    runner = model_runner(max_batch=96, max_tokens=1 << 16)
    runner.server_args.enable_deterministic_inference = deterministic
    heads = HeadConfig(48, 1, 64)
    workspace = build(runner, heads, Settings(), FLASHINFER).executor.workspace
    wanted = sum(tensor.nbytes for tensor in vars(workspace).values())
    pages = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": wanted}
    monkeypatch.setattr(os, "sysconf", pages.get)
    build(runner, heads, Settings(), FLASHINFER)
    pages["SC_PHYS_PAGES"] -= 1
    message = (
        f"plans of 96 requests take {wanted:,} bytes, where {wanted - 1:,} are free: lower "
        "--max-running-requests or --mem-fraction-static, or, for deterministic inference, "
        "--context-length"
    )
    with pytest.raises(ValueError, match=message):
        build(runner, heads, Settings(), FLASHINFER)
