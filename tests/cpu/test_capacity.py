"""The workspace of an executor: what fits it, and how it grows."""

from dataclasses import replace

import pytest

from sgl_prefix_attn.plan.capacity import Capacity
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.kernel_rates import PortableRates
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.records import HeadConfig, PlanTooLarge
from tests.support.forests import path_table, planner, random_paths


def test_sizes_grow_to_powers_of_two():
    grown = Capacity(100, 1000, 8).grown_to(Capacity(65, 1025, 9))
    assert grown == Capacity(128, 2048, 16)
    assert Capacity(100, 1000, 8).grown_to(Capacity(1, 1, 1)) == Capacity(100, 1000, 8)


def test_a_cut_that_fits_is_found_however_many_blocks_others_read():
    """A cut without parts takes fewer slots and partial results than one that reads as much."""
    forest = build_forest(path_table([(-1, 1024)], [0] * 8, [10] * 8))
    made = Planner(
        HeadConfig(8, 2, 128), num_sms=132, rates=PortableRates(), tile_rows=64, splits_nodes=True
    )
    needs = {Capacity.for_plans(made.serialize(forest, cut)) for cut in made.cuts(forest)}
    assert len(needs) > 3
    for made.capacity in needs:
        assert made.capacity.covers(made.plan_forest(forest))


@pytest.mark.parametrize("name", ["words", "index_slots", "partials"])
def test_a_plan_fits_to_the_last_word(name):
    plan = planner(HeadConfig(8, 2, 32), "naive").plan(random_paths(2, 30, 20))
    exact = Capacity.for_plans(plan)
    exact.check(plan)
    with pytest.raises(PlanTooLarge, match="the plan needs"):
        replace(exact, **{name: getattr(exact, name) - 1}).check(plan)
