"""Row-tile plans: the words run in torch give full attention, through splits and growth."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_prefix_attn.execute import interpreter as oracle
from sgl_prefix_attn.execute.full_attention import full_attention
from sgl_prefix_attn.kernels import words as W
from sgl_prefix_attn.plan import cut_time, search, serialize, tiles
from sgl_prefix_attn.plan.capacity import UNLIMITED, Capacity
from sgl_prefix_attn.plan.cut_time import parts_within
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.kernel_rates import KernelRates
from sgl_prefix_attn.plan.leaves import cut_at_roots, order_leaves
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.records import HeadConfig, PathTable
from sgl_prefix_attn.tools.calibrate.batches import draw
from tests.support.examples import chosen, examples
from tests.support.forests import LENGTHS, path_table, path_tables, random_paths
from tests.support.plan_blocks import poisoned_blocks
from tests.support.problems import make_problem

HEADS = (HeadConfig(8, 2, 8), HeadConfig(7, 1, 8), HeadConfig(2, 2, 8), HeadConfig(16, 1, 8))


def planner(heads: HeadConfig, headroom: int = 20) -> Planner:
    """Of a small GPU, so that few requests fill it and few blocks are split."""
    return Planner(heads, num_sms=16, headroom=headroom)


def check_output(words, problem, blocks) -> None:
    """Every request's output and LSE are full attention's, in fp64."""
    out, lse = oracle.execute(
        words, problem.q, problem.k, problem.v, blocks,
        sm_scale=problem.sm_scale, logits_soft_cap=problem.soft_cap,
    )  # fmt: skip
    want, want_lse = full_attention(
        problem.q, problem.k, problem.v, problem.req_to_token, problem.pool, problem.seq_lens,
        sm_scale=problem.sm_scale, logits_soft_cap=problem.soft_cap,
    )  # fmt: skip
    torch.testing.assert_close(out, want, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(lse, want_lse.values, rtol=1e-9, atol=1e-9)


def loaded(plan, problem):
    """The plan's words as a tensor, and blocks that were poison before they were filled."""
    words = torch.from_numpy(plan.words.copy())
    blocks = poisoned_blocks(plan.num_blocks, problem.poison_slot)
    oracle.fill(words, problem.req_to_token, problem.pool, blocks)
    return words, blocks


def check_all_cuts(paths, heads, *, growth=0, soft_cap=0.0, page_size=1, most=99) -> None:
    made = planner(heads, max(growth, 1))
    forest = build_forest(paths)
    cuts = sorted(made.cuts(forest), key=lambda cut: cut.us)
    for cut in chosen(cuts, most):
        problem = make_problem(
            paths, heads, torch.float64, soft_cap=soft_cap, page_size=page_size, room=growth
        )
        plan = made.serialize(forest, cut)
        words, blocks = loaded(plan, problem)
        check_output(words, problem, blocks)
        generator = torch.Generator().manual_seed(0)
        for step in range(1, growth + 1):
            slots = problem.grow(generator)
            oracle.append(words, problem.seq_lens, slots, blocks)
            if step in (1, growth // 2, growth):
                again = oracle.Blocks(blocks.slots.clone(), blocks.keys.clone())
                oracle.append(words, problem.seq_lens, slots, again)
                assert torch.equal(again.slots, blocks.slots), "append is not idempotent"
                assert words[W.H_STEPS] == step
                check_output(words, problem, blocks)


@given(path_tables(), st.sampled_from(HEADS), st.integers(0, 20), st.sampled_from([0.0, 3.0]))
@examples(60)
def test_every_cut_computes_full_attention(paths, heads, growth, soft_cap):
    check_all_cuts(paths, heads, growth=growth, soft_cap=soft_cap, most=4)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("batch", [1, 37, pytest.param(113, marks=pytest.mark.slow)])
def test_odd_batches(batch, heads):
    check_all_cuts(random_paths(batch, batch, 25), heads, growth=3, most=5)


def test_a_large_odd_batch():
    check_all_cuts(random_paths(113, 113, 25), HEADS[1], growth=1, most=3)


def test_odd_lengths_and_splits():
    paths = path_table([(-1, 4097)], [0, 0, 0, -1, -1, -1], [1, 63, 4097, 1, 63, 4097])
    made = planner(HEADS[1])
    assert max(int(cut.parts.max()) for cut in made.cuts(build_forest(paths))) >= 8
    check_all_cuts(paths, HEADS[1], growth=2, most=3)


def test_256_steps_of_growth():
    check_all_cuts(random_paths(3, 9, 5), HEADS[0], growth=256, most=2)


def test_pages():
    lengths = [length for length in LENGTHS if length % 16 == 0]
    check_all_cuts(random_paths(4, 20, 8, lengths), HEADS[0], page_size=16, most=4)


def test_a_step_behind_the_headroom_is_not_written():
    """A server replans before; a captured append must not write behind its columns anyway."""
    paths = random_paths(1, 5, 3)
    problem = make_problem(paths, HEADS[0], torch.float64)
    plan = planner(HEADS[0], headroom=2).plan(paths)
    words, blocks = loaded(plan, problem)
    before = blocks.slots.clone()
    slots = torch.arange(5)
    oracle.append(words, problem.seq_lens + 3, slots, blocks)
    assert torch.equal(before, blocks.slots) and words[W.H_STEPS] == 2
    oracle.append(words, problem.seq_lens - 1, slots, blocks)
    assert torch.equal(before, blocks.slots) and words[W.H_STEPS] == 0


def test_warming_up_compiles_every_loop():
    made = planner(HEADS[0])
    made.warm_up()
    loops = (
        search._search, search.edges_of, tiles.lay_out, tiles._count, serialize._serialize,
        cut_time.time_ways,
    )  # fmt: skip
    compiled = {loop: len(loop.signatures) for loop in loops}
    assert all(compiled.values())
    made.plan(random_paths(6, 30, 8))
    assert all(len(loop.signatures) == count for loop, count in compiled.items())


def test_no_requests():
    """What a captured graph is replayed over before there is anything to decode."""
    none = np.empty(0, np.int32)
    plan = planner(HEADS[0]).plan(PathTable(none, none, none.astype(np.int64), none, none))
    assert plan.num_items == 0 and plan.words[W.H_BATCH] == 0


@pytest.mark.parametrize("part_tokens", [0, 2048])
@pytest.mark.parametrize("heads", [(32, 8), (32, 4), (8, 1), (4, 1)])
def test_the_planner_takes_about_the_best_cut(heads, part_tokens):
    """It may end its search early, and what it leaves out is not much better: also with few KV
    heads, where tiles must be narrow or split for all SMs to have work."""
    made = Planner(HeadConfig(*heads, 128), num_sms=132, part_tokens=part_tokens)
    for batch in draw(11, 60, pool_tokens=450_000):
        forest = build_forest(batch.paths)
        best = min(cut.us for cut in made.cuts(forest))
        assert made.plan_forest(forest).predicted_us <= 1.02 * best, batch.name


@pytest.mark.slow
@given(path_tables(max_batch=40), st.sampled_from(HEADS))
@examples(60)
def test_a_plan_counts_what_its_words_read(paths, heads):
    """Metrics believe it: slots that are filled, items, partial rows."""
    made = planner(heads)
    forest = build_forest(paths)
    problem = make_problem(paths, heads, torch.float64)
    for cut in made.cuts(forest):
        plan = made.serialize(forest, cut)
        words = torch.from_numpy(plan.words)
        blocks = poisoned_blocks(plan.num_blocks, W.NONE)
        oracle.fill(words, problem.req_to_token, problem.pool, blocks)
        stats, items = plan.stats, plan.items
        assert stats.kv_tokens_read == (blocks.slots >= 0).sum()
        assert stats.kv_tokens_unique <= stats.kv_tokens_read <= stats.kv_tokens_query_centric
        assert stats.kv_tokens_query_centric == paths.seq_lens.sum()
        assert stats.num_items == len(items) and stats.num_nodes == forest.parent.size
        split = items[items[:, W.I_PARTS] > 1]
        assert stats.num_partials == (split[:, W.I_ROWS] // heads.group_size).sum()
        assert stats.num_tiles == len(items) - len(split) + (split[:, W.I_PART] == 0).sum()
        assert plan.predicted_us == cut.us


def test_of_the_cuts_that_fit_the_fastest_is_taken():
    """And where none does, the fastest of all, for the executor to refuse."""
    paths = random_paths(2, 40, 12)
    asked = []

    class Noted(Capacity):
        def covers(self, plan):
            asked.append(plan)
            return super().covers(plan)

    def within(index_slots):
        capacity = Noted(UNLIMITED.words, index_slots, UNLIMITED.partials)
        return Planner(HEADS[2], num_sms=64, capacity=capacity).plan(paths)

    best = within(UNLIMITED.index_slots)
    assert asked == [best]
    smaller = within(best.num_index_slots - 1)
    assert smaller.num_blocks < best.num_blocks and smaller.predicted_us >= best.predicted_us
    assert smaller is asked[-1]
    asked.clear()
    none = within(0)
    assert not asked, "what reads more than there is room for is not tried"
    assert np.array_equal(none.words, best.words)


# --- layout ---------------------------------------------------------------------------------------
@given(path_tables(max_batch=40), st.sampled_from(HEADS))
@examples(60)
def test_every_block_is_written_once(paths, heads):
    """ORDER names each block of each item once, and segments fill each column once."""
    made = planner(heads)
    forest = build_forest(paths)
    for cut in made.cuts(forest):
        plan = made.serialize(forest, cut)
        w = plan.words
        order = w[w[W.H_ORDER] : w[W.H_GROWTHS]]
        assert np.unique(order).size == order.size
        assert order.size == 0 or 0 <= order.min() and order.max() < plan.num_blocks - W.LOOKAHEAD
        written = np.zeros(plan.num_blocks * W.BLOCK, int)
        first = w[W.H_SEGMENTS]
        segments = w[first : first + w[W.H_NUM_SEGMENTS] * W.SEGMENT_WORDS]
        for segment in segments.reshape(-1, W.SEGMENT_WORDS):
            columns = segment[W.S_COLUMN] + np.arange(segment[W.S_LEN])
            blocks = w[segment[W.S_ORDER] + columns // W.BLOCK]
            written[blocks * W.BLOCK + columns % W.BLOCK] += 1
            assert segment[W.S_LEN] <= plan.longest
        want = np.zeros_like(written).reshape(-1, W.BLOCK)
        want[order] = 1
        assert np.array_equal(written, want.ravel())
        assert plan.num_items == cut.parts.sum()


@given(path_tables(max_batch=40, lengths=(1, 63, 4097)), st.sampled_from(HEADS))
@examples(30)
def test_parts_of_a_tile_stay_equally_long_while_it_grows(paths, heads):
    """The slowest one sets the pace: after any number of steps none has more blocks than an even
    share of them all, one for what does not divide and one that growth has begun."""
    headroom, forest = W.BLOCK, build_forest(paths)
    made = planner(heads, headroom)
    steps = np.arange(headroom + 1)[:, None]
    for cut in made.cuts(forest):
        items = made.serialize(forest, cut).items
        blocks = items[:, W.I_BLOCKS] + -(-steps * items[:, W.I_GROWING] // W.BLOCK)
        starts = np.flatnonzero(items[:, W.I_PART] == 0)
        for of_tile in np.split(blocks, starts[1:], axis=1):
            parts = of_tile.shape[1]
            assert (of_tile.max(1) <= of_tile.sum(1) // parts + 2).all()
        for of_tile in np.split(items, starts[1:]):
            grows = of_tile[:, W.I_GROWING] > 0
            planned = of_tile[:, W.I_BLOCKS]
            assert not grows.any() or (planned[~grows] >= planned[grows].max()).all()


@pytest.mark.parametrize("heads", [HeadConfig(8, 1, 128), HeadConfig(32, 8, 128)], ids=str)
def test_no_cut_that_a_plan_leaves_out_as_hopeless_is_faster(heads):
    made = Planner(heads, num_sms=132, rates=KernelRates())
    for seed in range(40):
        rng = np.random.default_rng(seed)
        batch, nodes = int(rng.integers(2, 200)), int(rng.integers(1, 30))
        tree = build_forest(random_paths(seed, batch, nodes, (1, 17, 64, 300, 1000, 4097)))
        (search,) = made._searches(tree)
        every = search.candidates()
        assert every[-1].most == 1, "the narrowest tiles are among them"
        fastest = min(candidate.us for candidate in every)
        assert made.plan_forest(tree).predicted_us <= 1.01 * fastest


@given(path_tables(max_batch=40), st.sampled_from(HEADS))
@examples(30)
def test_runs_that_go_on_for_the_same_queries_are_one(paths, heads):
    for cut in planner(heads).cuts(build_forest(paths)):
        tiles = cut.tiles
        for begin, end in zip(tiles.offset[:-1], tiles.offset[1:], strict=True):
            request, start, length, first, last = tiles.run[begin:end].T
            goes_on = start[:-1] + length[:-1] == start[1:]
            for column in (request, first, last):
                goes_on &= column[:-1] == column[1:]
            assert not goes_on.any()


def test_columns_of_one_half_are_passed_on_by_the_other():
    """32 private tails of 300 tokens in one tile: each warpgroup multiplies about half of them."""
    paths = path_table([(-1, 128)], [0] * 32, [300] * 32)
    made = planner(HEADS[0])
    cut = next(iter(made.cuts(build_forest(paths))))
    plan = made.serialize(build_forest(paths), cut)
    item = plan.words[W.HEADER_WORDS :]
    flags = plan.words[item[W.I_FLAGS] :]
    each = [
        flags[b // W.FLAGS_PER_WORD] >> (b % W.FLAGS_PER_WORD * W.FLAG_BITS) & W.FOR_BOTH
        for b in range(item[W.I_BLOCKS])
    ]
    assert item[W.I_BLOCKS] == 152
    assert sum(flag == W.FOR_BOTH for flag in each) <= 6


def test_leaves_stand_side_by_side():
    paths = path_table([(-1, 5), (0, 6), (-1, 7)], [1, 2, 0, -1, 1, 2, 0, -1], [1] * 8)
    leaves = order_leaves(build_forest(paths))
    assert leaves.request.tolist() == [0, 4, 2, 6, 1, 5, 3, 7]
    assert leaves.root.tolist() == [0, 0, 0, 0, 4, 4, 6, 6]
    assert cut_at_roots(leaves.root, 3).tolist() == [0, 2, 4, 6, 8]
    assert cut_at_roots(leaves.root, 4).tolist() == [0, 4, 6, 8]


@pytest.mark.parametrize("budget", [1, 5, 16, 200])
def test_parts_stay_within_the_budget(budget):
    costs, most = np.array([1.0, 5.0, 9.0, 0.5]), np.array([3, 40, 40, 1])
    parts = parts_within(costs, budget, most)
    assert (parts <= most).all() and parts.min() >= 1
    assert parts.sum() <= max(budget, costs.size)


@pytest.mark.parametrize("tile_rows", [64, 128])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 12, 16, 64])
def test_keys(group, tile_rows):
    """Every range of queries, as the rows of a tile see it."""
    queries = W.queries_per_tile(group, tile_rows)
    rows = torch.arange(queries * group)
    for first, end in ((0, 1), (0, queries), (queries // 2, queries), (queries - 1, queries)):
        keys = torch.tensor([W.make_key(first, end, group, tile_rows)], dtype=torch.int32)
        want = (rows // group >= first) & (rows // group < end)
        assert torch.equal(oracle.sees(keys, rows, group, tile_rows)[:, 0], want)
    assert W.item_words(group, tile_rows) >= W.I_QUERIES + queries


# --- the check itself -----------------------------------------------------------------------------
def drop_item(words):
    words[W.H_NUM_ITEMS] -= 1


def shift_a_segment(words):
    words[words[W.H_SEGMENTS] + W.S_START] += 1


def wrong_key(words):
    words[words[W.H_SEGMENTS] + W.SEGMENT_WORDS * 2 + W.S_KEY] = 6


def unmask_a_block(words):
    flags = words[W.HEADER_WORDS + W.I_FLAGS]
    words[flags] = W.FOR_BOTH * 0x11


def swap_queries(words):
    at = W.HEADER_WORDS + W.I_QUERIES
    words[at : at + 2] = words[at : at + 2].flip(0)


@pytest.mark.parametrize(
    "fault", [drop_item, shift_a_segment, wrong_key, unmask_a_block, swap_queries]
)
def test_the_check_finds_a_planted_fault(fault):
    paths = path_table([(-1, 20), (0, 40)], [1, 1, 0], [33, 34, 60])
    problem = make_problem(paths, HEADS[0], torch.float64)
    made, forest = planner(HEADS[0]), build_forest(paths)
    plan = made.serialize(forest, next(iter(made.cuts(forest))))
    words, blocks = loaded(plan, problem)
    check_output(words, problem, blocks)
    fault(words)
    blocks = poisoned_blocks(plan.num_blocks, problem.poison_slot)
    oracle.fill(words, problem.req_to_token, problem.pool, blocks)
    with pytest.raises(AssertionError):
        check_output(words, problem, blocks)
