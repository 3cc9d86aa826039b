"""The cuts of a step into aligned tiles (aligned.py), with their predicted times."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from sgl_prefix_attn.jit import cached_njit
from sgl_prefix_attn.plan.aligned import AlignedCut, at_blocks, divide, whole_below
from sgl_prefix_attn.plan.cut_time import part_costs, predict_parts
from sgl_prefix_attn.plan.kernel_rates import KernelRates, rate_values
from sgl_prefix_attn.plan.leaves import LeafOrder
from sgl_prefix_attn.plan.search import MOST, Candidate, edges_of, is_among
from sgl_prefix_attn.plan.tiles import B_MASKED, B_UNMASKED, Tiles, lay_out, make_tiles
from sgl_prefix_attn.records import Forest, HeadConfig


@dataclass(frozen=True)
class AlignedSearch:
    """Search (search.py) where parts begin at multiples of part_tokens, and nothing else is a way
    to split; headroom: steps that plans may grow by."""

    forest: Forest
    leaves: LeafOrder
    heads: HeadConfig
    num_sms: int
    rates: KernelRates
    most: int
    part_tokens: int
    headroom: int

    @cached_property
    def _is_whole(self) -> np.ndarray:
        """Whether the row at each place has one part."""
        sees = self.forest.seq_lens[self.leaves.request] - self.leaves.after
        return sees < whole_below(self.part_tokens)

    def candidates(self, _hopeless: float = math.inf) -> list[Candidate]:
        """List the cuts as Search.candidates does, but of all widths: none is hopeless, because
        narrow tiles are the only way to work for all CTAs."""
        below, leaves = at_blocks(self.forest), self.leaves
        found = _search(
            below.parent, below.start, below.end, below.tail_parent, below.tail_start,
            below.seq_lens, leaves.request, leaves.query, leaves.after, leaves.first, leaves.last,
            leaves.root, self._is_whole, 2 if below.query_lens is None else 3, self.most,
            self.part_tokens, self.headroom, rate_values(self.rates), self.forest.unique_tokens,
            self.heads.sizes, self.num_sms,
        )  # fmt: skip
        return [
            Candidate(us, int(most), int(kind), 0, int(blocks))
            for us, most, kind, blocks in found.tolist()
        ]

    def cut(self, candidate: Candidate) -> AlignedCut:
        """Lay out the parts of one of the candidates."""
        edge = edges_of(candidate.kind, self.leaves.root, self.leaves.after, candidate.most)
        return self.cut_at(edge, candidate.us)

    def cut_at(self, edge: np.ndarray, us: float = 0.0) -> AlignedCut:
        """Lay out the parts of the tiles between edges int32 [T+1] of places."""
        group = self.heads.group_size
        whole = make_tiles(at_blocks(self.forest), self.leaves, edge, group)
        parts, edges, places, *rest = divide(
            edge, whole.offset, whole.run, self._is_whole, self.part_tokens, self.headroom, group
        )
        tiles = Tiles(edges, *rest)
        order = replace(
            self.leaves, request=self.leaves.request[places], query=self.leaves.query[places]
        )
        part = np.arange(edges.size - 1) - np.repeat(np.cumsum(parts) - parts, parts)
        costs = part_costs(tiles, self.heads, self.rates)
        return AlignedCut(
            order, tiles, np.ones_like(part), costs, us,
            part=part, whole=edge, headroom=self.headroom,
        )  # fmt: skip


@cached_njit
def _search(
    parent, start, end, tail_parent, tail_start, seq_lens, request, query, after, first, last, root,
    is_whole, kinds, most, part_tokens, headroom, rates, unique_tokens, heads, num_sms,
):  # fmt: skip
    group = heads.group_size
    found = np.empty((MOST, 4))
    size = 0
    seen = [np.empty(0, np.int32)]
    while most >= 1:
        for kind in range(kinds):
            edge = edges_of(kind, root, after, most)
            if is_among(edge, seen):
                continue
            seen.append(edge)
            offset, run, _ = lay_out(
                parent, start, end, tail_parent, tail_start, seq_lens, request, after, first, last,
                edge, group,
            )  # fmt: skip
            _, edges, places, _, _, blocks = divide(
                edge, offset, run, is_whole, part_tokens, headroom, group
            )
            found[size, 0] = predict_parts(
                rates, query[places], edges, blocks, unique_tokens, heads, num_sms
            )
            found[size, 1] = most
            found[size, 2] = kind
            found[size, 3] = blocks[:, B_UNMASKED].sum() + blocks[:, B_MASKED].sum()
            size += 1
        most //= 2
    return found[:size].copy()
