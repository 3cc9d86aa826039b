"""Requests whose own KV is not finite, and who may be hit by it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from sgl_prefix_attn.records import PathTable
from tests.support.forests import path_table
from tests.support.problems import Problem, assert_attention, plain_attention, values_of


class Poison(NamedTuple):
    """What becomes of a token of a request. cache: "k" or "v"; value: of one of its elements;
    token: which one, by the request's length."""

    cache: str
    value: float
    request: int
    token: Callable[[int], int]


NAN, INF = math.nan, math.inf

# Of forest(): requests 0 to 3 share 270 tokens, 0 to 6 the first 70 of them; 7 and 8 share nothing.
POISONS = {
    "private V": Poison("v", NAN, 5, lambda n: n - 1),
    "private K": Poison("k", NAN, 5, lambda n: n - 1),
    "infinite private V": Poison("v", INF, 2, lambda n: n - 3),
    "minus infinite private V": Poison("v", -INF, 7, lambda n: 0),
    "infinite private K": Poison("k", INF, 7, lambda n: 0),
    "V of a node that some share": Poison("v", NAN, 1, lambda n: 200),
    "K of a node that some share": Poison("k", NAN, 1, lambda n: 75),
    "infinite V of a node that some share": Poison("v", INF, 3, lambda n: 71),
    "V of the root": Poison("v", NAN, 0, lambda n: 0),
    "K of the root": Poison("k", NAN, 0, lambda n: 69),
}

# a capped score is finite, whatever the key
CAPPED = [name for name in POISONS if name != "infinite private K"]


def forest(long: int = 200) -> PathTable:
    """Nine requests: a node that seven share, one that four of them share, `long` tokens, and two
    requests by themselves."""
    nodes = [(-1, 70), (0, long)]
    return path_table(nodes, [1, 1, 1, 1, 0, 0, 0, -1, -1], [5, 70, 64, 9, 1, 130, 33, 300, 7])


def poisoned(problem: Problem, poison: Poison, head: int = -1) -> Problem:
    """The problem with one element of a token of one KV head changed, its caches copied."""
    bad = copy.copy(problem)
    bad.k, bad.v = problem.k.clone(), problem.v.clone()
    if problem.heads.latent_dim:
        bad.v = values_of(bad.k, problem.heads)
    token = poison.token(int(problem.seq_lens[poison.request]))
    slot = problem.req_to_token[problem.pool[poison.request], token].long()
    if poison.cache == "v":
        bad.v[slot, head, 3] = poison.value
    else:  # where infinite, so that a query of the request scores it plus infinity
        query = problem.q[poison.request, head * problem.heads.group_size, -1]
        bad.k[slot, head, -1] = poison.value * query.sign()
    return bad


def assert_contained(
    problem: Problem, bad: Problem, out: torch.Tensor, lse: torch.Tensor | None = None
) -> None:
    """out [rows, Hq, D] and lse of `bad` are not finite in exactly the rows and heads that see what
    was poisoned, and otherwise the attention of `problem`, which is the same before poisoning."""
    want, want_lse = plain_attention(problem, torch.float64)
    of_bad, _ = plain_attention(bad, torch.float64)
    hit = ~of_bad.isfinite().all(-1)
    assert hit.any() and not hit.all(), "the poison hits nobody, or everybody"
    lost = ~out.isfinite().all(-1)
    assert not (lost & ~hit).any(), f"hit without seeing it: {_rows(lost & ~hit)}"
    assert not (hit & ~lost).any(), f"not hit: {_rows(hit & ~lost)}"
    # infinite keys take a token out of heads whose queries point away from them
    touched = (of_bad != want).any(-1)
    healed = torch.where(touched[..., None], want.to(out.dtype), out)
    if lse is not None:
        lse = torch.where(touched, want_lse.to(lse.dtype), lse)
    assert_attention(problem, healed, lse)


def _rows(which: torch.Tensor) -> str:
    return f"rows {which.any(1).nonzero().flatten().tolist()}"
