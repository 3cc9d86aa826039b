"""Aligned plans on a GPU: a request's results are the same bits in each batch, by either kernel."""

from __future__ import annotations

import pytest
import torch

from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.records import HeadConfig
from tests.support.kernels import FAMILIES, backend_of
from tests.support.problems import assert_attention
from tests.support.running import executor_of, run
from tests.support.universe import Universe, batches, differing

PART = 128  # so that short requests have many parts
SHAPES = {
    "32/8": (HeadConfig(32, 8, 128), torch.bfloat16, {}),
    "28/4": (HeadConfig(28, 4, 128), torch.float16, {}),
    "64/8": (HeadConfig(64, 8, 128), torch.bfloat16, {"soft_cap": 20.0}),
    "8/1": (HeadConfig(8, 1, 128), torch.bfloat16, {}),
    "16/2 of 256": (HeadConfig(16, 2, 256), torch.bfloat16, {}),
    "64/8 of 64": (HeadConfig(64, 8, 64), torch.bfloat16, {"has_sinks": True}),
}


def universe_of(name: str) -> Universe:
    heads, dtype, options = SHAPES[name]
    return Universe.small(heads, dtype=dtype, device="cuda", spread=6.0, **options)


def all_differing(universe: Universe, family: str, part_tokens: int) -> list[tuple[int, str]]:
    backend = backend_of(family, universe.heads, universe.dtype, part_tokens=part_tokens)

    def planner(num_sms: int) -> Planner:
        return Planner(
            universe.heads, num_sms=num_sms, tile_rows=backend.tile_rows, part_tokens=part_tokens
        )

    found, wrong = {}, []
    for batch in batches(universe, planner):
        executor = executor_of(backend, batch.problem, batch.plan)
        executor.load(batch.plan, batch.problem.req_to_token, batch.problem.pool)
        out, lse = run(executor, batch.problem)
        wrong += differing(found, batch, out, lse)
        if len(batch.ids) > 1:
            assert_attention(batch.problem, out, lse)
    return wrong


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", SHAPES)
def test_a_requests_bits_are_the_same_in_each_batch(name, family):
    assert all_differing(universe_of(name), family, PART) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_the_default_mode_does_not_do_that(family):
    universe = universe_of("32/8")
    assert len({i for i, _ in all_differing(universe, family, 0)}) > 12
