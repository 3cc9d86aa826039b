"""Aligned plans: the part, block and column of a row's KV are a function of its length alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_prefix_attn.execute import interpreter as oracle
from sgl_prefix_attn.execute.backends.torch_backend import TorchBackend
from sgl_prefix_attn.kernels import words as W
from sgl_prefix_attn.plan import aligned, aligned_search, aligned_words
from sgl_prefix_attn.plan.aligned_search import AlignedSearch
from sgl_prefix_attn.plan.capacity import UNLIMITED, Capacity
from sgl_prefix_attn.plan.cut_time import predict_us
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.kernel_rates import KernelRates, PortableRates
from sgl_prefix_attn.plan.leaves import order_leaves
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.records import HeadConfig, PathTable
from tests.support.aligned import expected, read_by
from tests.support.examples import chosen, examples
from tests.support.forests import nested_paths, path_table, path_tables, random_paths
from tests.support.plan_blocks import poisoned_blocks
from tests.support.problems import make_problem

HEADS = (HeadConfig(8, 2, 8), HeadConfig(7, 1, 8), HeadConfig(2, 2, 8), HeadConfig(16, 1, 8))
LENGTHS = (1, 2, 17, 63, 64, 65, 127, 130, 200)
PART = 128
WHOLE = PART + PART // 2  # the length from which on a row has several parts


def planner(heads: HeadConfig, headroom: int = 0, part_tokens: int = PART, tile_rows: int = 128):
    return Planner(
        heads, num_sms=16, rates=PortableRates(), headroom=headroom, part_tokens=part_tokens,
        tile_rows=tile_rows,
    )  # fmt: skip


def loaded(plan, problem):
    words = torch.from_numpy(plan.words.copy())
    blocks = poisoned_blocks(plan.num_blocks, problem.poison_slot)
    oracle.fill(words, problem.req_to_token, problem.pool, blocks)
    return words, blocks


def check_rows(words, blocks, problem, group, part_tokens=PART, query_lens=None) -> None:
    """Each row's KV is where its positions say, and all rows are there."""
    found = read_by(words, blocks, group)
    lens = np.ones(problem.pool.numel(), int) if query_lens is None else query_lens
    query = 0
    for slots, count in zip(problem.slots(), lens, strict=True):
        for after in range(count - 1, -1, -1):
            sees = slots[: slots.numel() - after].tolist()
            assert found.pop(query) == expected(sees, part_tokens)
            query += 1
    assert not found


@given(
    # of 330 tokens more than a part of 256 is shared by rows that have one part, and by others
    path_tables(max_batch=40, lengths=(*LENGTHS, 330)), st.sampled_from(HEADS),
    st.sampled_from([64, 128]), st.sampled_from([64, PART, 256, 1024]),
)  # fmt: skip
@examples(60)
def test_columns_follow_from_positions(paths, heads, tile_rows, part_tokens):
    made, forest = planner(heads, 0, part_tokens, tile_rows), build_forest(paths)
    problem = make_problem(paths, heads)
    for cut in chosen(list(made.cuts(forest)), 4):
        words, blocks = loaded(made.serialize(forest, cut), problem)
        check_rows(words, blocks, problem, heads.group_size, part_tokens)


@given(path_tables(max_batch=20, lengths=LENGTHS), st.sampled_from(HEADS), st.data())
@examples(60)
def test_wherever_the_tiles_end(paths, heads, data):
    """Not only where the search cuts them."""
    made, forest = planner(heads), build_forest(paths)
    batch, most = paths.leaf.size, made.tile_queries
    inner = data.draw(st.sets(st.integers(1, batch))) | set(range(0, batch + 1, most)) | {0, batch}
    edge = np.array(sorted(inner), np.int32)
    search = AlignedSearch(forest, order_leaves(forest), heads, 16, PortableRates(), most, PART, 0)
    problem = make_problem(paths, heads)
    words, blocks = loaded(made.serialize(forest, search.cut_at(edge)), problem)
    check_rows(words, blocks, problem, heads.group_size)


@pytest.mark.slow
@given(path_tables(max_batch=20, lengths=LENGTHS), st.sampled_from(HEADS), st.integers(1, 150))
@examples(40)
def test_appended_plans_are_as_freshly_made_ones(paths, heads, growth):
    """Through blocks and parts that begin on the way, until a row begins to have several."""
    made, forest = planner(heads, growth), build_forest(paths)
    left = [PART + PART // 2 - 1 - n for n in paths.seq_lens.tolist() if n < PART + PART // 2]
    for cut in chosen(list(made.cuts(forest)), 2):
        problem = make_problem(paths, heads, room=growth)
        plan = made.serialize(forest, cut)
        words, blocks = loaded(plan, problem)
        check_rows(words, blocks, problem, heads.group_size)
        generator = torch.Generator().manual_seed(0)
        assert plan.appends_left == min([growth, *left])
        growth = plan.appends_left
        for step in range(1, growth + 1):
            slots = problem.grow(generator)
            for _ in range(2):
                oracle.append(words, problem.seq_lens, slots, blocks)
            if step in (1, growth // 2, growth):
                check_rows(words, blocks, problem, heads.group_size)


@pytest.mark.slow
@given(path_tables(max_batch=9, lengths=LENGTHS), st.sampled_from(HEADS), st.data())
@examples(40)
def test_several_tokens_a_request(paths, heads, data):
    """A token's KV is where a decode step has it."""
    longest = paths.seq_lens - [sum_of_path(paths, row) for row in range(paths.leaf.size)]
    lens = np.array([data.draw(st.integers(1, min(int(n), 70))) for n in longest], np.int32)
    made, forest = planner(heads, 64), build_forest(paths, lens)
    problem = make_problem(paths, heads)
    for cut in chosen(list(made.cuts(forest)), 4):
        words, blocks = loaded(made.serialize(forest, cut), problem)
        check_rows(words, blocks, problem, heads.group_size, query_lens=lens)


def sum_of_path(paths: PathTable, row: int) -> int:
    total, node = 0, int(paths.leaf[row])
    while node >= 0:
        total, node = total + int(paths.length[node]), int(paths.parent[node])
    return total


@given(path_tables(max_batch=40, lengths=LENGTHS), st.sampled_from(HEADS), st.integers(0, 100))
@examples(40)
def test_every_block_is_written_once(paths, heads, headroom):
    """Segments fill each column that an item may ever read once, and none of another's."""
    made, forest = planner(heads, headroom), build_forest(paths)
    for cut in made.cuts(forest):
        plan = made.serialize(forest, cut)
        w = plan.words
        written = np.zeros(plan.num_blocks * W.BLOCK, int)
        segments = w[w[W.H_SEGMENTS] :][: w[W.H_NUM_SEGMENTS] * W.SEGMENT_WORDS]
        for segment in segments.reshape(-1, W.SEGMENT_WORDS):
            columns = segment[W.S_COLUMN] + np.arange(segment[W.S_LEN])
            entries = w[segment[W.S_ORDER] + columns // W.BLOCK] * W.BLOCK + columns % W.BLOCK
            written[entries] += 1
            assert 0 < segment[W.S_LEN] <= plan.longest
        assert written.max() == 1
        items = plan.items
        for i, item in enumerate(items):
            assert item[W.I_BLOCKS] >= 1
            b = np.arange(item[W.I_BLOCKS])
            at = np.where(b < W.PRE, i * W.PRE + b, item[W.I_REST] + b - W.PRE)
            assert written.reshape(-1, W.BLOCK)[at].all()
        split = items[items[:, W.I_PARTS] > 1]
        tiles = split[split[:, W.I_PART] == 0]
        assert np.unique(tiles[:, W.I_COUNTER]).size == len(tiles)
        partial = split[:, W.I_PARTIAL] + split[:, W.I_PART]
        assert np.array_equal(np.sort(partial), np.arange(plan.num_partial_tiles))


@given(
    path_tables(max_batch=40, lengths=(*LENGTHS, 170, 185, 191)), st.sampled_from(HEADS),
    st.sampled_from([1, 20, 64]),
)  # fmt: skip
@examples(60)
def test_a_plan_behind_one_that_ended_early_has_its_tiles(paths, heads, headroom):
    """Its rows are read as those of any other plan, and no cut is searched for where it ends early,
    too, within the steps of one plan."""
    made = planner(heads, headroom)
    before = made.plan(paths)
    ended_early = before.appends_left + 1 < headroom
    later = replace(paths, seq_lens=paths.seq_lens + before.appends_left + 1)
    crossing = (paths.seq_lens < WHOLE) & (later.seq_lens >= WHOLE)
    assert crossing.any() or not ended_early
    searched, candidates = [], AlignedSearch.candidates

    def search(*args):
        searched.append(args)
        return candidates(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AlignedSearch, "candidates", search)
        plan = made.plan_forest(build_forest(later), before)
    has_its_tiles = before.appends_left + 1 + plan.appends_left < headroom
    assert bool(searched) != has_its_tiles
    assert not has_its_tiles or plan.edge.tolist() == before.edge.tolist()
    problem = make_problem(later, heads)
    words, blocks = loaded(plan, problem)
    check_rows(words, blocks, problem, heads.group_size)


def test_tiles_are_searched_for_anew_after_as_many_steps_as_a_plan_may_last(monkeypatch):
    """However many plans end early meanwhile: of 40 requests one gets a second part in each
    step."""
    made, lens = planner(HEADS[0], 16), np.arange(40, dtype=np.int32)
    paths = path_table([(-1, 100)], [0] * 40, (WHOLE - 101 - lens).tolist())
    searched, candidates, plan = [], AlignedSearch.candidates, None
    monkeypatch.setattr(
        AlignedSearch, "candidates", lambda *args: searched.append(step) or candidates(*args)
    )
    for step in range(40):
        forest = build_forest(replace(paths, seq_lens=paths.seq_lens + step))
        plan = made.plan_forest(forest, plan)
        assert plan.appends_left == 0 or step == 39
    assert searched == [0, 16, 32]


def test_tiles_that_no_longer_fit_are_searched_for_anew():
    """A row that has two parts stands in its tile beside those that have one: blocks of both."""
    paths = path_table([(-1, 150)], [0] * 16, [41] * 8 + [2] * 8)
    made = planner(HEADS[0], 64)
    before = made.plan(paths)
    later = build_forest(replace(paths, seq_lens=paths.seq_lens + 1))
    assert before.appends_left == 0
    largest = made.plan_forest(later, before)
    made.capacity = replace(Capacity.for_plans(largest), index_slots=largest.num_index_slots - 1)
    narrower = made.plan_forest(later, before)
    assert made.capacity.covers(narrower) and not made.capacity.covers(largest)
    assert narrower.edge.tolist() != before.edge.tolist()


@given(
    path_tables(max_batch=40, max_nodes=20, lengths=(*LENGTHS, 700)), st.sampled_from(HEADS),
    st.integers(0, 100),
)  # fmt: skip
@examples(60)
def test_a_server_has_room_for_any_batch(paths, heads, headroom):
    """Of as many requests over as many slots: none may go to stock kernels."""
    backend = TorchBackend(heads, torch.float32, torch.device("cpu"), None, PART)
    forest = build_forest(paths)
    capacity = backend.server_capacity(
        paths.leaf.size, forest.unique_tokens, headroom, int(paths.seq_lens.max())
    )
    made = backend.planner(PortableRates(), headroom=headroom, capacity=capacity)
    assert capacity.covers(made.plan_forest(forest))


def test_a_server_has_room_for_narrow_tiles():
    """Where one head's wide tiles would leave most CTAs without work."""
    heads = HeadConfig(4, 1, 8)
    forest = build_forest(path_table([], [-1] * 64, [1000] * 64))
    backend = TorchBackend(heads, torch.float32, torch.device("cpu"), None, 256)
    backend.num_sms = 132
    capacity = backend.server_capacity(64, 64 * 1000, 64, 1000)
    fitting, fastest = (
        backend.planner(PortableRates(), headroom=64, capacity=each).plan_forest(forest)
        for each in (capacity, UNLIMITED)
    )
    in_widest_tiles = 4 * 5
    assert fitting.num_items == fastest.num_items > in_widest_tiles


@pytest.mark.parametrize("tokens", [1, 40])
def test_a_server_has_room_for_rows_of_one_part_and_of_two_in_turn(tokens):
    """Below a node that is longer than a part, each of its children has rows of both kinds."""
    nodes = [(-1, 340), *[(0, 1)] * 20]
    paths = path_table(nodes, [i // 2 + 1 for i in range(40)], [42, 43] * 20)
    lens = None if tokens == 1 else np.full(40, tokens, np.int32)
    forest = build_forest(paths, lens)
    for heads in HEADS:
        backend = TorchBackend(heads, torch.float32, torch.device("cpu"), None, 256)
        capacity = backend.server_capacity(40 * tokens, forest.unique_tokens, 0, 384, 40)
        made = backend.planner(PortableRates(), headroom=0, capacity=capacity)
        assert capacity.covers(made.plan_forest(forest))


def test_rows_of_one_part_stand_beside_each_other():
    """What they share beyond the length of a part is read once for each kind of rows."""
    forest = build_forest(path_table([(-1, 330)], [0] * 16, [5, 60] * 8))
    (search,) = planner(HEADS[0], 0, 256)._searches(forest)
    cut = search.cut_at(np.array([0, 16], np.int32))
    # the node's last whole block ends at 320
    assert cut.stats(forest).kv_tokens_read == 256 + 2 * 64 + 8 * (15 + 70)


def test_a_server_has_room_for_nested_prompts():
    paths = nested_paths(113, 100)
    backend = TorchBackend(HEADS[3], torch.float32, torch.device("cpu"), None, PART)
    tokens = build_forest(paths).unique_tokens
    capacity = backend.server_capacity(113, tokens, 64, int(paths.seq_lens.max()))
    made = backend.planner(PortableRates(), headroom=64, capacity=capacity)
    assert capacity.covers(made.plan(paths))


@examples(40)
@given(data=st.data(), heads=st.sampled_from(HEADS))
def test_a_server_has_room_for_each_batch_of_prompts(data, heads):
    """Of as many new tokens as it was made for, however they fall on requests, behind prefixes as
    long as they can be."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    queries, requests, longest = 96, int(rng.integers(1, 9)), 700
    lens = rng.multinomial(queries - requests, np.ones(requests) / requests) + 1
    shared = int(rng.integers(0, longest - queries))
    own = rng.integers(0, longest - queries - shared + 1, requests)
    paths = path_table([(-1, shared)], [0] * requests, (own + lens).tolist())
    forest = build_forest(paths, lens.astype(np.int32))
    backend = TorchBackend(heads, torch.float32, torch.device("cpu"), None, PART)
    capacity = backend.server_capacity(queries, forest.unique_tokens, 0, longest, requests)
    made = backend.planner(PortableRates(), capacity=capacity)
    assert capacity.covers(made.plan_forest(forest))


def test_no_requests():
    none = np.empty(0, np.int32)
    plan = planner(HEADS[0], 64).plan(PathTable(none, none, none.astype(np.int64), none, none))
    assert plan.num_items == 0 and plan.words[W.H_BATCH] == 0


def test_a_long_prefix_is_read_once_a_tile():
    paths = path_table([(-1, 4000)], [0] * 32, [10] * 32)
    made = planner(HEADS[0], 0, 1024)
    plan = made.plan(paths)
    assert plan.stats.kv_tokens_read <= 32 * (64 + 10) + 2 * 4000
    assert plan.stats.num_tiles < plan.num_items


@pytest.mark.parametrize("rates", [KernelRates(), PortableRates()], ids=["hopper", "portable"])
def test_a_candidates_time_is_that_of_its_parts(rates):
    heads, paths = HEADS[0], path_table([(-1, 4000)], [0] * 20, [10] * 20)
    forest = build_forest(paths)
    search = AlignedSearch(forest, order_leaves(forest), heads, 16, rates, 32, PART, 3)
    widths = set()
    for candidate in search.candidates():
        cut = search.cut(candidate)
        known = (
            cut.tiles, cut.leaves.query, cut.costs, cut.parts, forest.unique_tokens, heads, 16,
            rates,
        )  # fmt: skip
        # partial results in float32: two bytes more an element
        more = 2 * cut.leaves.query.size * heads.num_qo_heads * heads.value_dim / rates.partial
        assert candidate.us == pytest.approx(predict_us(*known) + more)
        widths |= set((np.diff(cut.tiles.edge) * heads.group_size > rates.narrow_rows).tolist())
    assert widths == {False, True}


def test_warming_up_compiles_every_loop():
    made = planner(HEADS[0], 64)
    made.warm_up()
    loops = aligned.divide, aligned_search._search, aligned_words._serialize
    compiled = {loop: len(loop.signatures) for loop in loops}
    assert all(compiled.values())
    made.plan(random_paths(6, 30, 8))
    assert all(len(loop.signatures) == count for loop, count in compiled.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"part_tokens": 100}, "multiple of 64"),
        ({"part_tokens": -64}, "multiple of 64"),
        ({"part_tokens": 64, "strategy": "naive", "splits_nodes": True}, "strategy naive"),
    ],
)
def test_what_no_aligned_plan_can_have_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Planner(HEADS[0], num_sms=16, **options)


# --- the check itself -----------------------------------------------------------------------------
TREE = path_table([(-1, 150), (0, 90)], [1, 1, 0, 1, 0], [33, 200, 60, 1, 70])


def parts_of_the_tile(words):
    """They are in the opposite order."""
    size = W.item_words(4, 128)
    items = words[W.HEADER_WORDS :][: words[W.H_NUM_ITEMS] * size].view(-1, size)
    part = items[:, W.I_PART].clone()
    items[:, W.I_PART] = items[:, W.I_PARTS] - 1 - part


def another_order(words):
    """The first two of an item's blocks change places in what fills them."""
    order = words[W.H_ORDER]
    words[order : order + 2] = words[order : order + 2].flip(0)


def shifted_growth(words):
    g = words[W.H_GROWTHS]
    words[g + W.G_INDEX] += 1


def growth_that_does_not_count(words):
    """Of requests that begin blocks."""
    for g in range(5):
        words[words[W.H_GROWTHS] + g * W.GROWTH_WORDS + W.G_ITEMS] = 0


@pytest.mark.parametrize(
    "fault", [parts_of_the_tile, another_order, shifted_growth, growth_that_does_not_count]
)
def test_the_check_finds_a_planted_fault(fault):
    made, problem = planner(HEADS[0], 40), make_problem(TREE, HEADS[0], room=40)
    words, _ = loaded(made.plan(TREE), problem)
    fault(words)
    blocks = poisoned_blocks(words.numel(), problem.poison_slot)
    oracle.fill(words, problem.req_to_token, problem.pool, blocks)
    for _ in range(40):
        slots = problem.grow(torch.Generator().manual_seed(0))
        oracle.append(words, problem.seq_lens, slots, blocks)
    with pytest.raises(AssertionError):
        check_rows(words, blocks, problem, 4)


def test_the_check_finds_packed_columns():
    """Plans as they are without part_tokens."""
    problem = make_problem(TREE, HEADS[0])
    words, blocks = loaded(planner(HEADS[0], 0, 0).plan(TREE), problem)
    with pytest.raises(AssertionError):
        check_rows(words, blocks, problem, 4)
