"""A row-tile plan's words run in torch: the oracle of the row-tile kernel.

Each function does what the kernel of the same name does, reading nothing but the words, so that a
plan which is wrong is wrong here too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sgl_prefix_attn.kernels.gluon import words as W


@dataclass
class Blocks:
    """slots int32 [entries], keys int32 [entries]: what fill and append write."""

    slots: torch.Tensor
    keys: torch.Tensor


def fill(
    words: torch.Tensor, req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, blocks: Blocks
) -> None:
    """Copy every segment's slots from req_to_token [R, C], and write its key."""
    first, count = words[[W.H_SEGMENTS, W.H_NUM_SEGMENTS]].tolist()
    for w in range(first, first + count * W.SEGMENT_WORDS, W.SEGMENT_WORDS):
        segment = words[w : w + W.SEGMENT_WORDS].tolist()
        at = _entries(words, segment[W.S_ORDER], segment[W.S_COLUMN], segment[W.S_LEN])
        blocks.keys[at] = segment[W.S_KEY]
        if segment[W.S_REQUEST] == W.NONE:
            blocks.slots[at] = W.NONE
            continue
        row = req_to_token[req_pool_indices[segment[W.S_REQUEST]]]
        start = segment[W.S_START]
        blocks.slots[at] = row[start : start + segment[W.S_LEN]].to(torch.int32)


def append(
    words: torch.Tensor, seq_lens: torch.Tensor, out_cache_loc: torch.Tensor, blocks: Blocks
) -> None:
    """Write each request's newest slot into its tile's growth columns, and the step; idempotent.
    Rows above the plan's batch are padding and are left alone. seq_lens, out_cache_loc [>= B]."""
    headroom = words[W.H_HEADROOM].item()
    for row in range(int(words[W.H_BATCH])):
        w = words[W.H_GROWTHS].item() + row * W.GROWTH_WORDS
        growth = words[w : w + W.GROWTH_WORDS].tolist()
        step = seq_lens[row].item() - growth[W.G_LEN]
        if row == 0:
            words[W.H_STEPS] = min(max(step, 0), headroom)
        if 0 < step <= headroom:
            column = (step - 1) * growth[W.G_GROWING] + growth[W.G_INDEX]
            at = _entries(words, growth[W.G_ORDER], column, 1)
            blocks.slots[at] = out_cache_loc[row].to(torch.int32)
            blocks.keys[at] = growth[W.G_KEY]


def execute(
    words: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    blocks: Blocks,
    *,
    sm_scale: float,
    logits_soft_cap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run every item over every KV head, then merge the parts of split tiles.

    q [rows, Hq, D], caches [slots, Hkv, D]. Returns out [rows, Hq, D] and the LSE [rows, Hq] in
    base 2, both float64; what no item writes stays NaN.
    """
    out = torch.full(q.shape, math.nan, dtype=torch.float64)
    lse = torch.full(q.shape[:2], math.nan, dtype=torch.float64)
    parts: dict[int, list] = {}
    for item, queries, b_out, b_lse in run_items(
        words, q, k_cache, v_cache, blocks, sm_scale, logits_soft_cap
    ):
        if item[W.I_PARTS] == 1:
            _write(out, lse, queries, b_out, b_lse)
            continue
        found = parts.setdefault(item[W.I_COUNTER], [None] * item[W.I_PARTS])
        assert found[item[W.I_PART]] is None, "a part is run twice"
        found[item[W.I_PART]] = (item[W.I_PARTIAL], queries, b_out, b_lse)
    partials: set[int] = set()
    for found in parts.values():
        assert None not in found, "a part of a split tile is missing"
        first, queries = found[0][:2]
        assert all(p[0] == first and torch.equal(p[1], queries) for p in found)
        mine = set(range(first, first + len(found)))
        assert not mine & partials, "two tiles share a partial tile"
        partials |= mine
        lses = torch.stack([p[3] for p in found])
        total = torch.logsumexp(lses * math.log(2), 0)
        weight = torch.exp(lses * math.log(2) - total)
        merged = (weight[..., None] * torch.stack([p[2] for p in found])).sum(0)
        _write(out, lse, queries, merged, total / math.log(2))
    return out, lse


def run_items(
    words: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    blocks: Blocks,
    sm_scale: float,
    logits_soft_cap: float = 0.0,
) -> Iterator[tuple[list[int], torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Run each item: its words, queries [n], out [Hkv, rows, D] and LSE [Hkv, rows] in base 2."""
    _, num_qo_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    group = num_qo_heads // num_kv_heads
    grouped = q.double().view(q.shape[0], num_kv_heads, group, head_dim)
    for i in range(int(words[W.H_NUM_ITEMS])):
        item = words[W.HEADER_WORDS + i * W.item_words(group) :][: W.item_words(group)].tolist()
        queries = torch.tensor(item[W.I_QUERIES :][: item[W.I_ROWS] // group])
        # [heads, rows, D]
        b_q = grouped[queries].transpose(0, 1).reshape(num_kv_heads, -1, head_dim)
        b_out, b_lse = _attend(
            words, i, item, b_q, k_cache, v_cache, blocks, sm_scale, logits_soft_cap, group
        )
        yield item, queries, b_out, b_lse


def output_rows(words: torch.Tensor, group: int) -> torch.Tensor:
    """int64 [...]: the rows of q that have a place in a tile, each once."""
    size = W.item_words(group)
    items = words[W.HEADER_WORDS :][: int(words[W.H_NUM_ITEMS]) * size].view(-1, size).long()
    queries = items[:, W.I_QUERIES :]
    there = torch.arange(queries.shape[1]) * group < items[:, W.I_ROWS, None]
    return queries[there].unique()


def _attend(words, i, item, q, k_cache, v_cache, blocks, sm_scale, cap, group):
    """q [Hkv, rows, D] over an item's blocks: out and base-2 LSE. Rows without a token: 0, -inf."""
    planned = item[W.I_BLOCKS]
    count = planned + -(-words[W.H_STEPS].item() * item[W.I_GROWING] // W.BLOCK)
    rows = torch.arange(item[W.I_ROWS])
    wide = item[W.I_ROWS] > W.HALF_ROWS
    passed_on = [True, True]  # the first block must be for both
    logits, values = [], []
    for b in range(count):
        flags = W.GROWTH_FLAGS
        if b < planned:
            word = words[item[W.I_FLAGS] + b // W.FLAGS_PER_WORD].item()
            flags = word >> (b % W.FLAGS_PER_WORD * W.FLAG_BITS) & (1 << W.FLAG_BITS) - 1
        for side in range(2):
            mine = bool(flags & W.FOR_WARPGROUP << side)
            assert mine or not passed_on[side], "a warpgroup passes on two blocks in turn"
            passed_on[side] = not mine
        at = (i * W.PRE + b if b < W.PRE else item[W.I_REST] + b - W.PRE) * W.BLOCK
        slots = blocks.slots[at : at + W.BLOCK].long()
        keys = blocks.keys[at : at + W.BLOCK]
        there = slots >= 0
        k, v = (torch.where(there[:, None, None], c[slots.clamp(min=0)], 0).double()
                for c in (k_cache, v_cache))  # fmt: skip
        s = torch.einsum("hrd,thd->hrt", q, k) * sm_scale
        if cap > 0:
            s = cap * torch.tanh(s / cap)
        if flags & W.MASKED:
            s = s.where(sees(keys, rows, group), -math.inf)
        else:
            assert there.all(), "an unmasked block has an empty column"
        half = torch.where(wide & (rows >= W.HALF_ROWS), W.FOR_WARPGROUP * 2, W.FOR_WARPGROUP)
        if not wide:
            half = torch.full_like(half, W.FOR_WARPGROUP)
            assert flags & W.FOR_BOTH == W.FOR_BOTH or not flags & W.MASKED
        s = s.where((flags & half).bool()[:, None], -math.inf)
        logits.append(s)
        values.append(v)
    s, v = torch.cat(logits, 2), torch.cat(values)
    lse = torch.logsumexp(s, 2)
    weight = torch.exp(s - lse[..., None]).nan_to_num(0.0)
    # what a row must not see has weight 0 and may be no number: 0 * NaN would hide nothing
    assert not (v.isnan().any(2).any(1) & (weight.sum((0, 1)) > 0)).any()
    return torch.einsum("hrt,thd->hrd", weight, v), lse / math.log(2)


def sees(keys: torch.Tensor, rows: torch.Tensor, group: int) -> torch.Tensor:
    """bool [rows, columns]: which rows of a tile the columns with these keys are for."""
    keys = keys.long() & 0xFFFFFFFF
    if W.has_bit_keys(group):
        return (keys[None, :] >> (rows[:, None] // group) & 1).bool()
    return (rows[:, None] >= (keys & 0xFFFF)[None, :]) & (rows[:, None] < (keys >> 16)[None, :])


def _entries(words: torch.Tensor, order: int, column: int, length: int) -> torch.Tensor:
    """Entries of slots and keys of columns [column, column + length) of a list of blocks."""
    columns = torch.arange(column, column + length)
    return words[order + columns // W.BLOCK].long() * W.BLOCK + columns % W.BLOCK


def _write(out, lse, queries, b_out, b_lse) -> None:
    """b_out [Hkv, rows, D] of a tile's queries to out [rows, Hq, D], each once."""
    num_kv_heads, head_dim = b_out.shape[0], b_out.shape[2]
    shape = (num_kv_heads, queries.numel(), -1)
    assert out[queries].isnan().all(), "an output row is written twice"
    out[queries] = b_out.view(*shape, head_dim).transpose(0, 1).flatten(1, 2)
    lse[queries] = b_lse.view(shape).transpose(0, 1).flatten(1, 2)
