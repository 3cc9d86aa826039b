"""Requests with KV of their own or shared, and many batches of them: a request's results must be
the same bits in each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from sgl_prefix_attn.plan.aligned_search import AlignedSearch
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.leaves import cut_at_roots, cut_evenly, order_leaves
from sgl_prefix_attn.plan.plan import Plan
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.plan.search import EVENLY
from sgl_prefix_attn.records import HeadConfig, PathTable
from tests.support.problems import E4M3_SCALES, Problem
from tests.support.sinks import sinks_of

ALL = 99  # levels of the tree that a batch declares
SMALL_NODES = ((-1, 200), (0, 33), (0, 77), (1, 20), (1, 64), (2, 130))
SMALL_TAILS = (1, 30, 63, 64, 65, 100, 250, 5)


@dataclass
class Universe:
    """nodes [(parent, tokens)]; requests [(node or -1, tokens of their own)]."""

    heads: HeadConfig
    nodes: tuple
    requests: list
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None  # E4M3, with its scales, or like dtype
    soft_cap: float = 0.0
    spread: float = 1.5  # standard deviation of the logits
    has_sinks: bool = False
    room: int = 40  # tokens that requests may grow by
    device: str = "cpu"
    _kv: dict = field(default_factory=dict)

    @classmethod
    def small(cls, heads: HeadConfig, count: int = 24, **options) -> Universe:
        """Return so many requests, some of which share nothing."""
        leaves = [3, 4, 5, 1, 2, 0, 3, -1]
        tails = [SMALL_TAILS[(i * 5 + i // 8) % 8] for i in range(count)]
        requests = [(leaves[i % 8], tail) for i, tail in enumerate(tails)]
        return cls(heads, SMALL_NODES, requests, **options)

    @property
    def scales(self) -> tuple[float, float]:
        return (1.0, 1.0) if self.kv_dtype is None else E4M3_SCALES

    def chain(self, request: int) -> list[int]:
        node, nodes = self.requests[request][0], []
        while node >= 0:
            nodes.append(node)
            node = self.nodes[node][0]
        return nodes[::-1]

    def _tokens(self, key: tuple[str, int], count: int) -> tuple[torch.Tensor, ...]:
        """Keys, values and queries of a node's or request's tokens, the same in each batch."""
        if key not in self._kv:
            number = 2 * key[1] + (key[0] == "node")
            generator = torch.Generator().manual_seed(1000 + number)
            h = self.heads
            shapes = [h.num_kv_heads, h.num_kv_heads, h.num_qo_heads]
            dtypes = [self.kv_dtype or self.dtype] * 2 + [self.dtype]
            self._kv[key] = tuple(
                (torch.randn(count, n, h.head_dim, generator=generator) / scale).to(dtype)
                for n, dtype, scale in zip(shapes, dtypes, (*self.scales, 1.0), strict=True)
            )
        return self._kv[key]

    def problem(self, ids: list[int], depth: int = ALL, seed: int = 0, less: int = 0) -> Problem:
        """Return a batch that declares so many levels of the tree, in slots of a seed, each request
        `less` tokens short of its own."""
        rng = np.random.default_rng(seed)
        chains = [self.chain(i) for i in ids]
        sizes = {("node", n): self.nodes[n][1] for chain in chains for n in chain}
        sizes |= {("request", i): self.requests[i][1] + self.room for i in ids}
        num_slots = sum(sizes.values()) + 50
        free = iter((1 + rng.permutation(num_slots - 2)).tolist())
        slots = {key: [next(free) for _ in range(size)] for key, size in sizes.items()}
        h = self.heads
        k, v = (torch.full((num_slots, h.num_kv_heads, h.head_dim), math.nan) for _ in range(2))
        k, v = (cache.to(self.kv_dtype or self.dtype) for cache in (k, v))
        pool = rng.permutation(len(ids) + 2)[: len(ids)]
        rows = [
            [s for n in chain for s in slots["node", n]] + slots["request", i]
            for i, chain in zip(ids, chains, strict=True)
        ]
        req_to_token = np.full((len(ids) + 2, max(map(len, rows)) + 1), num_slots - 1, np.int32)
        lens = []
        for row, at in zip(rows, pool, strict=True):
            req_to_token[at, : len(row)] = row
            lens.append(len(row) - self.room - less)
        for key, mine in slots.items():
            count = len(mine) if key[0] == "node" else self.requests[key[1]][1] - less
            keys, values, _ = self._tokens(key, len(mine))
            k[mine[:count]], v[mine[:count]] = keys[:count], values[:count]
        kept = sorted({n for chain in chains for n in chain[:depth]})
        index = {n: i for i, n in enumerate(kept)}
        paths = PathTable.of(
            [index.get(self.nodes[n][0], -1) for n in kept],
            [self.nodes[n][1] for n in kept],
            [index[chain[:depth][-1]] if chain[:depth] else -1 for chain in chains],
            lens,
        )
        problem = Problem(
            paths=paths, heads=h, dtype=self.dtype, soft_cap=self.soft_cap,
            sm_scale=self.spread * h.head_dim**-0.5, q=self.queries(ids, less), k=k, v=v,
            req_to_token=torch.from_numpy(req_to_token), pool=torch.from_numpy(pool),
            seq_lens=torch.tensor(lens, dtype=torch.int32),
            sinks=sinks_of(h) if self.has_sinks else None,
            k_scale=self.scales[0], v_scale=self.scales[1],
        )  # fmt: skip
        for name in ("q", "k", "v", "req_to_token", "pool", "seq_lens", "sinks"):
            value = getattr(problem, name)
            setattr(problem, name, None if value is None else value.to(self.device))
        return problem

    def queries(self, ids: list[int], less: int = 0) -> torch.Tensor:
        """Return those of each request's newest token."""
        last = [self.requests[i][1] - 1 - less for i in ids]
        rows = [
            self._tokens(("request", i), self.requests[i][1] + self.room)[2][at]
            for i, at in zip(ids, last, strict=True)
        ]
        return torch.stack(rows).to(self.device)

    def grow(self, problem: Problem, ids: list[int], less: int) -> torch.Tensor:
        """Write the tokens that the requests were `less` short of, one each; returns their
        slots."""
        slots = problem.last_slots(1)
        for slot, i in zip(slots.tolist(), ids, strict=True):
            keys, values, _ = self._tokens(("request", i), self.requests[i][1] + self.room)
            at = self.requests[i][1] - less
            problem.k[slot], problem.v[slot] = keys[at].to(self.device), values[at].to(self.device)
        problem.q = self.queries(ids, less - 1)
        problem.seq_lens = problem.seq_lens + 1
        return slots


@dataclass(frozen=True)
class Batch:
    name: str
    ids: list[int]
    problem: Problem
    plan: Plan
    grows: int = 0  # steps until its requests are as long as the others'


def batches(universe: Universe, planner: Callable[[int], Planner]) -> Iterator[Batch]:
    """13 batches of the requests besides each of them alone; planner: of so many SMs."""
    everyone, rng = list(range(len(universe.requests))), np.random.default_rng(5)
    one, other = (rng.permutation(everyone).tolist() for _ in range(2))
    made = planner(16)
    most = made.tile_queries

    def batch(name, ids, width=None, roots=False, depth=ALL, seed=0, planner=made) -> Batch:
        problem = universe.problem(ids, depth, seed)
        forest = build_forest(problem.paths)
        if width is None:
            return Batch(name, ids, problem, planner.plan_forest(forest))
        search = next(iter(planner._searches(forest)))
        if isinstance(search, AlignedSearch):
            leaves = order_leaves(forest)
            width = min(width, most)
            edge = cut_at_roots(leaves.root, width) if roots else cut_evenly(len(ids), width)
            return Batch(name, ids, problem, planner.serialize(forest, search.cut_at(edge)))
        cuts = [c for c in search.candidates() if c.most <= width and (c.kind != EVENLY) == roots]
        chosen = cuts or search.candidates()
        return Batch(name, ids, problem, planner.serialize(forest, search.cut(chosen[0])))

    yield batch("all, as planned", everyone)
    yield batch("permuted, 16 wide", one, 16)
    yield batch("permuted again, widest, at roots", other, most, roots=True)
    yield batch("8 wide", everyone, 8)
    yield batch("one wide", everyone, 1)
    yield batch("permuted, 5 wide, at roots", one, 5, roots=True)
    yield batch("7 of them", one[:7])
    yield batch("half of them, widest", other[: len(other) // 2], most)
    yield batch("the root alone declared", everyone, most, depth=1)
    yield batch("two levels declared", one, depth=2)
    yield batch("no sharing declared", everyone, 16, depth=0)
    yield batch("in other slots", one, most, seed=1)
    yield batch("planned for many SMs", other, planner=planner(400))
    for i in everyone:
        yield batch(f"{i} alone", [i])


def differing(
    found: dict[int, torch.Tensor], batch: Batch, *results: torch.Tensor
) -> list[tuple[int, str]]:
    """List requests whose results are other bits than in the batches before, which `found` holds
    and to which they are added."""
    wrong = []
    for row, i in enumerate(batch.ids):
        bits = torch.cat([x[row].flatten().cpu().double() for x in results])
        assert bits.isfinite().all(), (i, batch.name)
        if not torch.equal(found.setdefault(i, bits), bits):
            wrong.append((i, batch.name))
    return wrong
