"""Which tile a pack gets, what is packed together, what is split."""

from dataclasses import replace

import numpy as np
import pytest

from sgl_prefix_attn.kernels import layout as L
from sgl_prefix_attn.plan import CostModel, Planner, TileConfig, TileSet
from sgl_prefix_attn.plan.estimate import estimated_us
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.packs import make_packs
from sgl_prefix_attn.plan.profit import choose_packing
from sgl_prefix_attn.plan.splits import split_jobs
from sgl_prefix_attn.plan.tiles import tile_packs
from sgl_prefix_attn.records import HeadConfig
from tests.support.forests import path_table, random_paths, splitting_costs
from tests.support.plan_words import check_coverage, items

HEADS = HeadConfig(8, 2, 64)
TAIL, PACKED = TileConfig(16, 32, requests=1), TileConfig(16, 32, requests=4)


def tile_set(**options) -> TileSet:
    shared = (TileConfig(16, 16), TileConfig(64, 32))
    return TileSet(**{"shared": shared, "tail": TAIL, "num_sms": 4, **options})


def naive_plan(paths, tiles, heads=HEADS):
    costs = splitting_costs(heads)
    return Planner(heads, tile_set=tiles, strategy="naive", costs=costs, headroom=0).plan(paths)


@pytest.mark.parametrize(
    "queries, tile, per_item",
    [  # group size 4; tile 0 is the tail's, 1 and 2 are shared
        (4, 1, [4]),  # 16 rows fit block_m 16
        (5, 2, [5]),  # 20 rows need block_m 64
        (16, 2, [16]),
        (17, 2, [9, 8]),  # two row tiles of like size
        (33, 2, [11, 11, 11]),
    ],
)
def test_smallest_tile_that_holds_the_rows(queries, tile, per_item):
    paths = path_table([(-1, 20)], [0] * queries, [1] * queries)
    plan = naive_plan(paths, tile_set(min_split=1 << 20))
    queues = {t: queue[:, L.I_NUM_QUERIES].tolist() for t, queue in items(plan) if len(queue)}
    assert queues == {0: [1] * queries, tile: per_item}


def test_short_tails_are_packed_only_where_enough_remain():
    paths = path_table([], [-1] * 10, [5, 40, 9, 9, 7, 33, 32, 1, 2, 3])

    def sizes(tickets):
        tiles = tile_set(packed_tail=PACKED, packed_len=32, packed_tickets=tickets)
        plan = naive_plan(paths, tiles)
        check_coverage(plan, paths)
        return {t: queue[:, L.I_NUM_QUERIES].tolist() for t, queue in items(plan) if len(queue)}

    # 8 tails of at most 32 tokens: two tiles, times 2 KV heads, are 4 tickets
    assert sizes(tickets=4) == {0: [1, 1], 1: [4, 4]}
    assert sizes(tickets=5) == {0: [1] * 10}


@pytest.mark.parametrize("batch", [1, 3, 7, 8, 9, 40])
def test_a_graph_launches_every_tile_that_a_plan_of_its_size_may_use(batch):
    tiles = tile_set(packed_tail=PACKED, packed_len=32, packed_tickets=4)
    assert tile_set().usable(batch, HEADS.num_kv_heads) == [0, 1, 2], "without packed tails: all"
    usable = tiles.usable(batch, HEADS.num_kv_heads)
    assert usable == ([0, 1, 2, 3] if batch >= 8 else [0, 2, 3])
    for requests in range(1, batch + 1):  # the rest of the graph's rows is padding
        plan = naive_plan(path_table([(-1, 20)], [0] * requests, [1] * requests), tiles)
        assert {t for t, queue in items(plan) if len(queue)} <= set(usable)


def test_no_split_below_min_split():
    paths = path_table([(-1, 127)], [0, 0], [127, 128])
    tiles = tile_set(min_split=128, longest=(1e-6,))
    assert all((q[:, L.I_NUM_SPLITS] == 1).all() for _, q in items(naive_plan(paths, tiles)))
    paths = path_table([(-1, 129)], [0, 0], [127, 128])
    shared = [q for _, q in items(naive_plan(paths, tiles)) if (q[:, L.I_LEN] != L.GROWS).all()]
    assert {n for queue in shared for n in queue[:, L.I_NUM_SPLITS].tolist()} == {2}


def test_launching_costs_keep_short_steps_whole():
    """A split that saves less than a launch costs is no gain."""
    paths = path_table([(-1, 4097)], [0, 0], [1, 1])
    costs = replace(splitting_costs(HEADS), launch=1e6)
    make = Planner(HEADS, tile_set=tile_set(), strategy="naive", costs=costs)
    assert all((q[:, L.I_NUM_SPLITS] == 1).all() for _, q in items(make.plan(paths)))


@pytest.mark.parametrize("share", [0.75, 0.2])
def test_no_item_outlasts_its_share_of_the_step_unless_its_job_is_too_short(share):
    paths = random_paths(1, 12, 6, lengths=(16, 200, 900, 3000))
    costs, tiles = CostModel.for_gpu("H100", HEADS), tile_set(num_sms=64, longest=(share,))
    forest = build_forest(paths)
    packs = make_packs(forest, choose_packing(forest, "naive", costs))
    tiling = tile_packs(packs, tiles, costs)
    splits, _ = split_jobs(packs, tiling, tiles, costs, most_partials=1 << 20)
    full = splits == tiling.most_splits
    assert (full | (tiling.step_share / splits <= share)).all()
    # ... and one split less would
    assert ((splits == 1) | (tiling.step_share / np.maximum(splits - 1, 1) > share)).all()
    assert (splits > 1).any() and not full.all()


@pytest.mark.parametrize("seed", range(8))
def test_splits_are_those_with_the_lowest_estimate(seed):
    paths = random_paths(seed, 12, 6, lengths=(16, 200, 900, 3000))
    costs = CostModel.for_gpu("H100", HEADS)

    def estimate(*shares):
        tiles = tile_set(num_sms=64, longest=shares)
        plan = Planner(HEADS, tile_set=tiles, strategy="naive", costs=costs).plan(paths)
        check_coverage(plan, paths)
        return estimated_us(plan.work, costs)

    shares = (0.75, 0.55, 0.4, 0.2, 1.0)
    alone = [estimate(share) for share in shares]
    assert len(set(alone)) > 1, "the shares differ here"
    assert estimate(*shares) == min(alone)


def test_a_tile_set_that_the_header_has_no_room_for_is_refused():
    with pytest.raises(ValueError, match="shared must hold at most 6 tiles"):
        tile_set(packed_tail=PACKED, shared=tuple(TileConfig(16 * i, 32) for i in range(1, 8)))


@pytest.mark.parametrize(
    ("tile", "group"),
    [
        ({}, 65),  # the tiles of tile_set() have up to 64 rows
        ({"packed_tail": PACKED}, 5),
        ({"packed_tail": TileConfig(32, 20, requests=8)}, 4),  # 20 columns for 8 requests
    ],
)
def test_tiles_that_cannot_hold_a_group_are_refused(tile, group):
    with pytest.raises(ValueError, match=f"cannot hold .* of {group} query heads"):
        Planner(HeadConfig(group, 1, 32), tile_set=tile_set(**tile))
