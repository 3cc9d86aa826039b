"""How long a plan takes, from its tiles alone: what the cut is chosen by.

The loops are compiled, and all ways to split one cut are one call: in a server that plans every now
and then each call of numpy finds cold caches and takes some ten microseconds.
"""

from __future__ import annotations

import numpy as np

from sgl_prefix_attn.jit import cached_njit
from sgl_prefix_attn.kernels import words as W
from sgl_prefix_attn.plan.kernel_rates import KernelRates, rate_values
from sgl_prefix_attn.plan.tiles import B_MASKED, B_UNMASKED, Tiles, parts_of_queries
from sgl_prefix_attn.records import HeadConfig

# bytes/us of outputs, written; set by hand, since they are a percent or two of a step.
_RESULTS = 6e6
# Bytes of an element of partial results, and of those of aligned plans.
_PARTIAL, _ALIGNED_PARTIAL = 2.0, 4.0
# Blocks that a part of a split tile has at least: a shorter one is mostly fixed cost.
LEAST_BLOCKS = 2
# Ways to split tiles: into parts for this share of the CTAs.
_SHARES = (1.0, 0.75, 0.5)


def part_costs(tiles: Tiles, heads: HeadConfig, rates: KernelRates) -> np.ndarray:
    """Return float [T]: CTA microseconds of each whole tile's blocks, for one KV head."""
    return _block_costs(rate_values(rates), tiles.edge, tiles.blocks, heads.sizes)


def predict_us(
    tiles: Tiles,
    query: np.ndarray,
    costs: np.ndarray,
    parts: np.ndarray,
    unique_tokens: int,
    heads: HeadConfig,
    num_sms: int,
    rates: KernelRates,
) -> float:
    """Microseconds of one layer: query int [...] of the tiles' places (LeafOrder), costs float [T]
    from part_costs, parts int [T] of each tile."""
    return _predict_us(
        rate_values(rates), query, tiles.edge, tiles.blocks, costs, parts, unique_tokens,
        heads.sizes, num_sms, _PARTIAL,
    )  # fmt: skip


@cached_njit
def _part_costs(block_rates, edge, blocks, heads, narrow_rows):
    wide, narrow, wide_masked, narrow_masked = block_rates
    costs = np.empty(edge.size - 1)
    for t in range(costs.size):
        is_wide = (edge[t + 1] - edge[t]) * heads.group_size > narrow_rows
        unmasked = blocks[t, B_UNMASKED] * (wide if is_wide else narrow)
        masked = blocks[t, B_MASKED] * (wide_masked if is_wide else narrow_masked)
        costs[t] = (unmasked + masked) * ((heads.head_dim + heads.value_dim) / 256)
    return costs


@cached_njit
def _block_costs(rates, edge, blocks, heads):
    """_part_costs by the rates of blocks among those of rate_values."""
    return _part_costs(rates[:4], edge, blocks, heads, rates[12])


@cached_njit
def _busiest_cta(item, products, parts, num_kv_heads, num_sms):
    """The most that a CTA has of items' costs, and of their products. Tickets as Hopper's kernels
    deal them: heaviest items first, rounds back and forth (schedule.py says of others)."""
    load, alone = np.zeros(num_sms), np.zeros(num_sms)
    ticket = 0
    for tile in np.argsort(-item, kind="mergesort"):
        for _ in range(parts[tile] * num_kv_heads):
            turn, cta = ticket // num_sms, ticket % num_sms
            if turn % 2 == 1:
                cta = num_sms - 1 - cta
            load[cta] += item[tile]
            alone[cta] += products[tile]
            ticket += 1
    return load.max(), alone.max()


@cached_njit
def _predict_us(
    rates, query, edge, blocks, costs, parts, unique_tokens, heads, num_sms, partial_size
):  # fmt: skip
    """The formula with rates in the order of rate_values, and bytes of an element of partial
    results."""
    _, _, _, _, per_item, hbm, l2, fixed, split, per_part, partial, overlap = rates[:12]
    narrow_rows, wide_products, narrow_products = rates[12:]
    alone = (wide_products, narrow_products, 0.0, 0.0)
    products = _part_costs(alone, edge, blocks, heads, narrow_rows) / parts
    item = np.empty(costs.size)
    read, partial_rows, most = 0, 0, 1
    parts_of = parts_of_queries(query, edge, parts)
    for count in parts_of:
        if count > 1:
            partial_rows += count
            most = max(most, count)
    for t in range(costs.size):
        queries = edge[t + 1] - edge[t]
        wide = queries * heads.group_size > narrow_rows
        item[t] = costs[t] / parts[t] + (per_item if wide else per_item / 2)
        read += blocks[t, B_UNMASKED] + blocks[t, B_MASKED]
    token_bytes = 2.0 * heads.token_dim * heads.num_kv_heads
    results = 2.0 * parts_of.size * heads.num_qo_heads * heads.value_dim
    busiest, arithmetic = _busiest_cta(item, products, parts, heads.num_kv_heads, num_sms)
    memory = unique_tokens * token_bytes / hbm + results / _RESULTS
    gathered = read * W.BLOCK * token_bytes / l2
    terms = busiest**overlap + memory**overlap + gathered**overlap
    us = max(terms ** (1 / overlap), arithmetic) + fixed
    if most > 1:
        partial_bytes = partial_rows * heads.num_qo_heads * (partial_size * heads.value_dim + 8)
        us += split + per_part * most + partial_bytes / partial
    return us


@cached_njit
def predict_parts(rates, query, edge, blocks, unique_tokens, heads, num_sms):
    """Return the microseconds of tiles that are the parts of an aligned plan already, for compiled
    callers."""
    costs = _block_costs(rates, edge, blocks, heads)
    return _predict_us(
        rates, query, edge, blocks, costs, np.ones(costs.size, np.int64), unique_tokens, heads,
        num_sms, _ALIGNED_PARTIAL,
    )  # fmt: skip


@cached_njit
def parts_within(costs: np.ndarray, budget: int, most: np.ndarray) -> np.ndarray:
    """Choose parts int [T] of tiles that cost so much, in all at most `budget`, or that and one for
    each tile whose share is less, and of each at most `most` int [T]: always one more for the tile
    whose parts are the heaviest."""
    parts = np.ones(costs.size, np.int64)
    if costs.size < budget:
        share = costs / costs.sum() * budget
        for i in range(costs.size):
            parts[i] = min(max(int(share[i]), 1), most[i])
    for _ in range(max(0, budget - parts.sum())):
        weight = costs / parts
        heaviest = weight.max()
        tile = np.where(parts < most, weight, -1.0).argmax()
        if parts[tile] >= most[tile] or weight[tile] < heaviest:
            break
        parts[tile] += 1
    return parts


@cached_njit
def time_ways(rates, query, edge, blocks, unique_tokens, heads, num_sms):
    """Cost tiles (Tiles.edge and .blocks) as they are, and split until every CTA has a ticket, or
    some of them.

    Returns costs float [T] (part_costs), parts int [ways, T], and microseconds float [ways] of each
    way (predict_us). Merging waits for the slowest part, so splits pay only while no CTA has a
    second ticket.
    """
    costs = _block_costs(rates, edge, blocks, heads)
    parts = np.ones((1 + len(_SHARES), costs.size), np.int64)
    ways = 1
    if costs.size * heads.num_kv_heads < num_sms and costs.sum() > 0:
        room = num_sms // heads.num_kv_heads
        read = blocks[:, B_UNMASKED] + blocks[:, B_MASKED]
        most = np.maximum(1, read // LEAST_BLOCKS).astype(np.int64)
        for share in _SHARES:
            wanted = parts_within(costs, max(costs.size, int(room * share)), most)
            if wanted.max() > 1 and (wanted != parts[ways - 1]).any():
                parts[ways] = wanted
                ways += 1
    us = np.empty(ways)
    for way in range(ways):
        us[way] = _predict_us(
            rates, query, edge, blocks, costs, parts[way], unique_tokens, heads, num_sms, _PARTIAL
        )
    return costs, parts[:ways], us
