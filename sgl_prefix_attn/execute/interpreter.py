"""A plan's words run in torch: the oracle of the kernels.

fill, append and execute do what fill_blocks_kernel, append_token_kernel and the attention kernels
do, reading nothing but the words, so that a plan which is wrong is wrong here too. Everything is
exact, in float64, but for aligned plans, whose results must not depend on what else a batch holds:
row_sums.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from sgl_prefix_attn.execute import row_sums
from sgl_prefix_attn.execute.row_sums import RowSums
from sgl_prefix_attn.kernels import words as W


@dataclass
class Blocks:
    """slots int32 [entries], keys int32 [entries]: what fill and append write."""

    slots: torch.Tensor
    keys: torch.Tensor


def fill(
    words: torch.Tensor, req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, blocks: Blocks
) -> None:
    """Copy every segment's slots from req_to_token [R, C], and write its key."""
    plan, slots, keys = words.numpy(), blocks.slots.numpy(), blocks.keys.numpy()
    table, pool = req_to_token.numpy(), req_pool_indices.numpy()
    first, count = plan[W.H_SEGMENTS], plan[W.H_NUM_SEGMENTS]
    segments = plan[first : first + count * W.SEGMENT_WORDS].reshape(-1, W.SEGMENT_WORDS)
    for segment in segments.tolist():
        columns = segment[W.S_COLUMN] + np.arange(segment[W.S_LEN])
        block = plan[segment[W.S_ORDER] + columns // W.BLOCK].astype(np.int64)
        at = block * W.BLOCK + columns % W.BLOCK
        keys[at] = segment[W.S_KEY]
        if segment[W.S_REQUEST] == W.NONE:
            slots[at] = W.NONE
        else:
            start = segment[W.S_START]
            slots[at] = table[pool[segment[W.S_REQUEST]], start : start + segment[W.S_LEN]]


def append(
    words: torch.Tensor, seq_lens: torch.Tensor, out_cache_loc: torch.Tensor, blocks: Blocks
) -> None:
    """Write each request's newest slot into its growth column, and the step; idempotent.
    Rows above the plan's batch are padding and are left alone. seq_lens, out_cache_loc [>= B]."""
    plan, slots, keys = words.numpy(), blocks.slots.numpy(), blocks.keys.numpy()
    headroom, batch = int(plan[W.H_HEADROOM]), int(plan[W.H_BATCH])
    lengths, newest = seq_lens.tolist(), out_cache_loc.tolist()
    for row in range(batch):
        w = plan[W.H_GROWTHS] + row * W.GROWTH_WORDS
        growth = plan[w : w + W.GROWTH_WORDS].tolist()
        step = lengths[row] - growth[W.G_LEN]
        if row == 0:
            plan[W.H_STEPS] = min(max(step, 0), headroom)
        if 0 < step <= headroom:
            column = (step - 1) * growth[W.G_GROWING] + growth[W.G_INDEX]
            block = int(plan[growth[W.G_ORDER] + column // W.BLOCK])
            at = block * W.BLOCK + column % W.BLOCK
            slots[at], keys[at] = newest[row], growth[W.G_KEY]
            if growth[W.G_ITEMS]:
                item = plan[growth[W.G_ITEMS] + column // W.BLOCK]
                before = _blocks_before(plan, item, block)
                plan[item + W.I_BLOCKS] = max(plan[item + W.I_BLOCKS], before + 1)


def execute(
    words: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    blocks: Blocks,
    *,
    sm_scale: float,
    logits_soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    v_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run every item over every KV head, then merge the parts of split tiles, and by query.

    q [rows, Hq, D], caches [slots, Hkv, D] and [slots, Hkv, Dv] of any dtype, sinks [Hq]; sm_scale
    with the keys' scale in it. Returns out [rows, Hq, Dv] and the LSE [rows, Hq] in base 2, both
    float64; what no item writes stays NaN.
    """
    out = torch.full((*q.shape[:2], v_cache.shape[2]), math.nan, dtype=torch.float64)
    lse = torch.full(q.shape[:2], math.nan, dtype=torch.float64)
    parts: dict[int, list] = {}
    places: dict[int, tuple] = {}
    tile_rows, group = int(words[W.H_TILE_ROWS]), q.shape[1] // k_cache.shape[1]
    for item, queries, results in run_items(
        words, q, k_cache, v_cache, blocks, sm_scale, logits_soft_cap
    ):
        if item[W.I_PARTS] == 1:
            _write(out, lse, queries, *_merged([results]), sinks)
        elif item[W.I_PARTS] == W.BY_QUERY:
            for i, query in enumerate(queries.tolist()):
                place, rows = item[W.I_PARTIAL] + i, slice(i * group, (i + 1) * group)
                assert place not in places, "two results have one place"
                places[place] = (query, tuple(x[:, rows] for x in results))
        else:
            found = parts.setdefault(item[W.I_COUNTER], [None] * item[W.I_PARTS])
            assert found[item[W.I_PART]] is None, "a part is run twice"
            found[item[W.I_PART]] = (item[W.I_PARTIAL], queries, results)
    partials: set[int] = set()
    for found in parts.values():
        assert None not in found, "a part of a split tile is missing"
        first, queries = found[0][:2]
        assert all(p[0] == first and torch.equal(p[1], queries) for p in found)
        mine = set(range(first, first + len(found)))
        assert not mine & partials, "two tiles share a partial tile"
        partials |= mine
        _write(out, lse, queries, *_merged([p[2] for p in found]), sinks)
    above_tiles = -(-(max(partials, default=-1) + 1) * tile_rows // group)
    assert min(places, default=above_tiles) >= above_tiles, "a place is in a partial tile"
    _merge_by_query(words, places, out, lse, sinks)
    return out * v_scale, lse


def _merge_by_query(words, places, out, lse, sinks) -> None:
    """Merge each query's places as MERGE names them; places {place: (query, its results)}."""
    merges, rows = words[W.H_MERGES].item(), {query for query, _ in places.values()}
    for row in sorted(rows):
        at = merges + row * W.MERGE_WORDS
        first, count = words[at : at + W.MERGE_WORDS].tolist()
        mine = words[first : first + count].tolist()
        assert all(places[place][0] == row for place in mine), "a place is another query's"
        counted = sum(query == row for query, _ in places.values())
        assert len({*mine}) == counted == count, "a query's results are not all merged once"
        merged = _merged([places[place][1] for place in mine])
        _write(out, lse, torch.tensor([row]), *merged, sinks)


def _merged(results) -> tuple[torch.Tensor, torch.Tensor]:
    """One result of several over the same rows: out [Hkv, rows, Dv], LSE [Hkv, rows] in base 2."""
    if isinstance(results[0], RowSums):
        return row_sums.merged(results).results()
    outs, lses = (torch.stack(x) for x in zip(*results, strict=True))
    total = torch.logsumexp(lses * math.log(2), 0)
    weight = _weight(lses * math.log(2), total)
    return (weight[..., None] * outs).sum(0), total / math.log(2)


def run_items(
    words: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    blocks: Blocks,
    sm_scale: float,
    logits_soft_cap: float = 0.0,
) -> Iterator[tuple[list[int], torch.Tensor, tuple]]:
    """Run each item: its words, queries [n], and results: RowSums of an aligned plan, else out
    [Hkv, rows, Dv] and LSE [Hkv, rows] in base 2."""
    _, num_qo_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    group = num_qo_heads // num_kv_heads
    grouped = q.view(q.shape[0], num_kv_heads, group, head_dim)
    size = W.item_words(group, int(words[W.H_TILE_ROWS]))
    for i in range(int(words[W.H_NUM_ITEMS])):
        item = words[W.HEADER_WORDS + i * size :][:size].tolist()
        queries = torch.tensor(item[W.I_QUERIES :][: item[W.I_ROWS] // group])
        # [heads, rows, D]
        b_q = grouped[queries].transpose(0, 1).reshape(num_kv_heads, -1, head_dim)
        yield (
            item,
            queries,
            _attend(
                words, i, item, b_q, k_cache, v_cache, blocks, sm_scale, logits_soft_cap, group
            ),
        )


def output_rows(words: torch.Tensor, group: int) -> torch.Tensor:
    """int64 [...]: the rows of q that have a place in a tile, each once."""
    size = W.item_words(group, int(words[W.H_TILE_ROWS]))
    items = words[W.HEADER_WORDS :][: int(words[W.H_NUM_ITEMS]) * size].view(-1, size).long()
    queries = items[:, W.I_QUERIES :]
    there = torch.arange(queries.shape[1]) * group < items[:, W.I_ROWS, None]
    return queries[there].unique()


def _attend(words, i, item, q, k_cache, v_cache, blocks, sm_scale, cap, group) -> tuple:
    """q [Hkv, rows, D] over an item's blocks: results as run_items has them, of rows without a
    token 0 and -inf."""
    slots, seen = _columns(words, i, item, blocks, group)
    there = (slots >= 0)[:, None, None]
    k, v = (torch.where(there, c[slots.clamp(min=0)], 0).double() for c in (k_cache, v_cache))
    k, v = clean(k, v)

    def masked(s, seen):
        s = s * sm_scale
        if cap > 0:
            s = cap * torch.tanh(s / cap)
        return s.where(seen, -math.inf)

    if words[W.H_PART_TOKENS]:
        sums = RowSums.none(q, v_cache.shape[2])
        for b_k, b_v, b_seen in zip(*(x.split(W.BLOCK) for x in (k, v, seen.T)), strict=True):
            sums = sums.over(masked(row_sums.scores(q, b_k), b_seen.T), b_v.float())
        return sums
    s = masked(torch.einsum("hrd,thd->hrt", q.double(), k), seen)
    lse = torch.logsumexp(s, 2)
    return torch.einsum("hrt,thd->hrd", _weight(s, lse[..., None]), v), lse / math.log(2)


def _columns(words, i, item, blocks, group) -> tuple[torch.Tensor, torch.Tensor]:
    """Read an item's blocks: their slots [columns], and bool [rows, columns]: which rows see
    them."""
    plan, planned, rows = words.numpy(), item[W.I_BLOCKS], torch.arange(item[W.I_ROWS])
    count = planned + -(-int(plan[W.H_STEPS]) * item[W.I_GROWING] // W.BLOCK)
    wide = item[W.I_ROWS] > W.HALF_ROWS
    half = torch.where(wide & (rows >= W.HALF_ROWS), W.FOR_WARPGROUP * 2, W.FOR_WARPGROUP)
    passed_on = [True, True]  # the first block must be for both
    all_slots, all_seen = [], []
    for b in range(count):
        flags = W.GROWTH_FLAGS
        if b < planned:
            word = int(plan[item[W.I_FLAGS] + b // W.FLAGS_PER_WORD])
            flags = word >> (b % W.FLAGS_PER_WORD * W.FLAG_BITS) & (1 << W.FLAG_BITS) - 1
        for side in range(2):
            mine = bool(flags & W.FOR_WARPGROUP << side)
            assert mine or not passed_on[side], "a warpgroup passes on two blocks in turn"
            passed_on[side] = not mine
        at = (i * W.PRE + b if b < W.PRE else item[W.I_REST] + b - W.PRE) * W.BLOCK
        slots = blocks.slots[at : at + W.BLOCK].long()
        seen = (flags & half).bool()[:, None]
        if flags & W.MASKED:
            keys = blocks.keys[at : at + W.BLOCK]
            seen = seen & sees(keys, rows, group, int(plan[W.H_TILE_ROWS]))
        else:
            assert (slots >= 0).all(), "an unmasked block has an empty column"
        if not wide:
            assert flags & W.FOR_BOTH == W.FOR_BOTH or not flags & W.MASKED
        all_slots.append(slots)
        all_seen.append(seen.expand(rows.numel(), W.BLOCK))
    return torch.cat(all_slots), torch.cat(all_seen, 1)


def clean(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of NaN and values of 0 where a token's values [t, Hkv, Dv] are not finite, so that rows
    which see it are NaN all over and, once its scores are masked, no others are, as in kernels."""
    finite = v.isfinite().all(2, keepdim=True)
    return k.where(finite, math.nan), v.where(finite, 0)


def _weight(logits: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """exp(logits - lse), and 0 where there is nothing to weigh: where both are -inf."""
    return torch.exp(logits - lse.where(lse != -math.inf, 0.0))


def sees(keys: torch.Tensor, rows: torch.Tensor, group: int, tile_rows: int) -> torch.Tensor:
    """bool [rows, columns]: which rows of a tile the columns with these keys are for."""
    keys = keys.long() & 0xFFFFFFFF
    if W.has_bit_keys(group, tile_rows):
        return (keys[None, :] >> (rows[:, None] // group) & 1).bool()
    return (rows[:, None] >= (keys & 0xFFFF)[None, :]) & (rows[:, None] < (keys >> 16)[None, :])


def _blocks_before(plan: np.ndarray, item: int, block: int) -> int:
    """Count the blocks that the item with these words reads before one of its blocks."""
    rest = int(plan[item + W.I_REST])
    return block % W.PRE if block < rest else block - rest + W.PRE


def _write(out, lse, queries, b_out, b_lse, sinks) -> None:
    """b_out [Hkv, rows, Dv] of a tile's queries to out [rows, Hq, D], each once; sinks [Hq] join
    here, where a row's results are whole."""
    num_kv_heads, value_dim = b_out.shape[0], b_out.shape[2]
    shape = (num_kv_heads, queries.numel(), -1)
    assert out[queries].isnan().all(), "an output row is written twice"
    b_out = b_out.view(*shape, value_dim).transpose(0, 1).flatten(1, 2)
    b_lse = b_lse.view(shape).transpose(0, 1).flatten(1, 2)
    if sinks is not None:
        total = torch.logaddexp(b_lse * math.log(2), sinks.double())
        b_out = b_out * _weight(b_lse * math.log(2), total)[..., None]
        b_lse = total / math.log(2)
    out[queries], lse[queries] = b_out, b_lse
