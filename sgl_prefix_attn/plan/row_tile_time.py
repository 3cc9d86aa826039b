"""How long a plan of row tiles takes, from its tiles alone: what the cut is chosen by.

The loops are compiled, and all ways to split one cut are one call: in a server that plans every now
and then each call of numpy finds cold caches and takes some ten microseconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sgl_prefix_attn.jit import cached_njit
from sgl_prefix_attn.kernels.gluon import words as W
from sgl_prefix_attn.plan.row_tiles import B_MASKED, B_UNMASKED, RowTiles
from sgl_prefix_attn.records import HeadConfig

# bytes/us of outputs, written; set by hand, since they are a percent or two of a step.
_RESULTS = 6e6
# The first four rates where nothing but the products of unmasked blocks bounds a step
# (docs/kernel-log.md). Decode steps, to which the rates are fitted, hardly ever get there; steps of
# many new tokens do.
_PRODUCTS = (1.03, 0.80, 0.0, 0.0)
# Blocks that a part of a split tile has at least: a shorter one is mostly fixed cost.
LEAST_BLOCKS = 2
# Ways to split tiles: into parts for this share of the CTAs.
_SHARES = (1.0, 0.75, 0.5)


@dataclass(frozen=True)
class RowTileRates:
    """What the row-tile kernel sustains on a GPU, for 16-bit KV; microseconds.

    wide, narrow      of a CTA, for an unmasked block of a tile of 128 rows, of 64 (head dim 128)
    wide_masked, narrow_masked  the same for a masked block
    item              of a CTA, for an item besides its blocks
    hbm, l2           bytes/us that all SMs together gather
    fixed             of a step, however little there is to do
    split             of a step, where any tile is split
    part              of a step, for each part of the tile that has most of them
    partial           bytes/us of partial results, written and read back
    overlap           exponent of the norm that joins CTAs, memory and L2: infinite where the
                      slowest hides the others

    The numbers are one fit to 12,508 cuts of 400 random batches on an H100, at eight head
    configurations of 128 (eval/results/row_tile_fit_h100.json): 5 to 6 % off, root mean square.
    They hold together, not one by one: with this exponent, rates are above what is measured alone.
    """

    wide: float = 0.6761
    narrow: float = 0.5587
    wide_masked: float = 0.5554
    narrow_masked: float = 0.6151
    item: float = 1.627
    hbm: float = 3.795e6
    l2: float = 52.08e6
    fixed: float = 4.292
    split: float = 1.533
    part: float = 0.06812
    partial: float = 1.192e6
    overlap: float = 1.265

    def __post_init__(self):
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be finite and >= 0, got {value!r}")


def part_costs(tiles: RowTiles, heads: HeadConfig, rates: RowTileRates) -> np.ndarray:
    """float [T]: CTA microseconds of each whole tile's blocks, for one KV head."""
    block_rates = _values(rates)[:4]
    return _part_costs(block_rates, tiles.edge, tiles.blocks, heads.group_size, heads.head_dim)


def predict_us(
    tiles: RowTiles,
    costs: np.ndarray,
    parts: np.ndarray,
    unique_tokens: int,
    heads: HeadConfig,
    num_sms: int,
    rates: RowTileRates,
) -> float:
    """Microseconds of one layer: costs float [T] from part_costs, parts int [T] of each tile."""
    return _predict_us(
        _values(rates), tiles.edge, tiles.blocks, costs, parts, unique_tokens,
        heads.num_qo_heads, heads.num_kv_heads, heads.head_dim, num_sms,
    )  # fmt: skip


def ways_to_split(
    tiles: RowTiles, unique_tokens: int, heads: HeadConfig, num_sms: int, rates: RowTileRates
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The tiles as they are, and split until every CTA has a ticket, or some of them.

    Returns costs float [T] (part_costs), parts int [ways, T], and microseconds float [ways] of each
    way (predict_us). Merging waits for the slowest part, so splits pay only while no CTA has a
    second ticket.
    """
    return _ways_to_split(
        _values(rates), tiles.edge, tiles.blocks, unique_tokens, heads.num_qo_heads,
        heads.num_kv_heads, heads.head_dim, num_sms,
    )  # fmt: skip


def _values(rates: RowTileRates) -> tuple[float, ...]:
    """The rates as the compiled loops take them, in the order of their fields."""
    return tuple(vars(rates).values())


@cached_njit
def _part_costs(block_rates, edge, blocks, group, head_dim):
    wide, narrow, wide_masked, narrow_masked = block_rates
    costs = np.empty(edge.size - 1)
    for t in range(costs.size):
        is_wide = (edge[t + 1] - edge[t]) * group > W.HALF_ROWS
        unmasked = blocks[t, B_UNMASKED] * (wide if is_wide else narrow)
        masked = blocks[t, B_MASKED] * (wide_masked if is_wide else narrow_masked)
        costs[t] = (unmasked + masked) * (head_dim / 128)
    return costs


@cached_njit
def _busiest_cta(item, products, parts, num_kv_heads, num_sms):
    """The most that a CTA has of items' costs, and of their products. Tickets as the kernel hands
    them out: heaviest items first, rounds back and forth."""
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
    rates, edge, blocks, costs, parts, unique_tokens, num_qo_heads, num_kv_heads, head_dim, num_sms
):
    """The formula with rates in the order of RowTileRates' fields."""
    _, _, _, _, per_item, hbm, l2, fixed, split, per_part, partial, overlap = rates
    group = num_qo_heads // num_kv_heads
    products = _part_costs(_PRODUCTS, edge, blocks, group, head_dim) / parts
    item = np.empty(costs.size)
    read, partial_rows, most = 0, 0, 1
    for t in range(costs.size):
        queries = edge[t + 1] - edge[t]
        wide = queries * group > W.HALF_ROWS
        item[t] = costs[t] / parts[t] + (per_item if wide else per_item / 2)
        read += blocks[t, B_UNMASKED] + blocks[t, B_MASKED]
        if parts[t] > 1:
            partial_rows += queries * parts[t]
            most = max(most, parts[t])
    token_bytes = 4.0 * head_dim * num_kv_heads
    results = 2.0 * edge[-1] * num_qo_heads * head_dim
    busiest, arithmetic = _busiest_cta(item, products, parts, num_kv_heads, num_sms)
    memory = unique_tokens * token_bytes / hbm + results / _RESULTS
    gathered = read * W.BLOCK * token_bytes / l2
    terms = busiest**overlap + memory**overlap + gathered**overlap
    us = max(terms ** (1 / overlap), arithmetic) + fixed
    if most > 1:
        partial_bytes = partial_rows * num_qo_heads * (2.0 * head_dim + 8)
        us += split + per_part * most + partial_bytes / partial
    return us


@cached_njit
def parts_within(costs: np.ndarray, budget: int, most: np.ndarray) -> np.ndarray:
    """Parts int [T] of tiles that cost so much, in all at most `budget`, or that and one for each
    tile whose share is less, and of each at most `most` int [T]: always one more for the tile whose
    parts are the heaviest."""
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
def _ways_to_split(
    rates, edge, blocks, unique_tokens, num_qo_heads, num_kv_heads, head_dim, num_sms
):
    costs = _part_costs(rates[:4], edge, blocks, num_qo_heads // num_kv_heads, head_dim)
    parts = np.ones((1 + len(_SHARES), costs.size), np.int64)
    ways = 1
    if costs.size * num_kv_heads < num_sms and costs.sum() > 0:
        room = num_sms // num_kv_heads
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
            rates, edge, blocks, costs, parts[way], unique_tokens, num_qo_heads, num_kv_heads,
            head_dim, num_sms,
        )  # fmt: skip
    return costs, parts[:ways], us
