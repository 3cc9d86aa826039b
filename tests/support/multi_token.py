"""Problems whose requests ask for several of their newest tokens, and faults of their plans."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

from sgl_prefix_attn.kernels import words as W
from sgl_prefix_attn.records import HeadConfig, PathTable
from tests.support.forests import path_tables
from tests.support.problems import Problem, make_problem

QUERY_LENS = (1, 1, 2, 3, 4, 7, 8, 31, 32, 33, 64, 120, 257, 512)


class MultiToken(NamedTuple):
    """requests: rows of req_to_token; queries: the same KV with a row for each query, as if each
    were a request of its own that ends at it: what full attention answers, one by one."""

    requests: Problem
    queries: Problem
    query_lens: np.ndarray


def multi_token(paths: PathTable, query_lens, heads: HeadConfig, dtype, **options) -> MultiToken:
    """Requests of `paths`, grown so that they have query_lens tokens where they had one."""
    lens = np.asarray(query_lens, np.int32)
    paths = replace(paths, seq_lens=(paths.seq_lens + lens - 1).astype(np.int32))
    problem = make_problem(paths, heads, dtype, room=0, **options)
    device = problem.q.device
    row = np.repeat(np.arange(lens.size), lens)
    after = np.concatenate([np.arange(n)[::-1] for n in lens])
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(row.size, heads.num_qo_heads, heads.head_dim, generator=generator)
    queries = replace(
        problem,
        q=q.to(problem.q),
        pool=problem.pool[torch.from_numpy(row).to(device)],
        seq_lens=torch.from_numpy(paths.seq_lens[row] - after).to(device),
    )
    return MultiToken(problem, queries, lens)


@st.composite
def asked_paths(draw, most=700, **options):
    """Forests, and how many tokens each request asks for: `most` in all, many requests one."""
    paths = draw(path_tables(**options))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    lens = rng.choice(QUERY_LENS, paths.leaf.size)
    lens[lens.cumsum() > most] = 1
    return paths, lens


# --- faults: each changes the words of a plan whose requests ask for several tokens ---------------


def _chain(words) -> list[int]:
    """Segments of one token that few queries see: the new tokens behind a request's first."""
    first = int(words[W.H_SEGMENTS])
    every = range(first, first + int(words[W.H_NUM_SEGMENTS]) * W.SEGMENT_WORDS, W.SEGMENT_WORDS)
    return [w for w in every if words[w + W.S_REQUEST] >= 0 and words[w + W.S_LEN] == 1]


def drop_a_token(words) -> None:
    words[_chain(words)[1] + W.S_KEY] = 0


def shift_a_column(words) -> None:
    """A token is seen by one query less: keys of ranges and of bits end where they ended."""
    one, after = _chain(words)[:2]
    words[one + W.S_KEY] = words[after + W.S_KEY]


def swap_chains(words) -> None:
    """Two requests see each other's new tokens."""
    requests = words[[w + W.S_REQUEST for w in _chain(words)]].tolist()
    one, other = list(dict.fromkeys(requests))[:2]
    for w in _chain(words):
        row = int(words[w + W.S_REQUEST])
        words[w + W.S_REQUEST] = {one: other, other: one}.get(row, row)


CHAIN_FAULTS = {fault.__name__: fault for fault in (drop_a_token, shift_a_column, swap_chains)}
