"""What a server allocates at start, and what it refuses to."""

import pytest
import torch

from sgl_prefix_attn.engine.build import build
from sgl_prefix_attn.records import HeadConfig
from sgl_prefix_attn.settings import Settings
from tests.support.forests import nested_paths
from tests.support.parallel import model_runner

RUNNER = model_runner(max_batch=48, max_tokens=4096)


def test_the_planner_keeps_within_what_is_allocated():
    built = build(RUNNER, HeadConfig(48, 1, 64), Settings(strategy="naive"))
    plan = built.planner.plan(nested_paths(48, 40))
    assert built.executor.capacity.covers(plan)
    # A plan that shares all of it would not fit.
    assert 48 * 49 // 2 > built.executor.capacity.partials > plan.num_partials


@pytest.mark.parametrize("headroom", [10**9, 10**8])
def test_a_headroom_beyond_the_memory_is_named_with_its_bytes(headroom):
    with pytest.raises(ValueError) as error:
        build(RUNNER, HeadConfig(8, 2, 64), Settings(headroom=headroom))
    assert f"SGL_PREFIX_ATTN_HEADROOM={headroom} takes {8 * 48 * headroom:,} bytes" in str(error)
    assert "lower it, or --max-running-requests" in str(error)


def test_on_a_gpu_it_is_the_free_memory_that_counts(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**6, 10**9))
    with pytest.raises(ValueError, match="takes 3,840,000 bytes .* where 1,000,000 are possible"):
        build(model_runner("cuda", max_batch=48), HeadConfig(8, 2, 64), Settings(headroom=10**4))
