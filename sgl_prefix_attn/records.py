"""The records that pass between stages, in the order of the data flow.

    PathTable -> Forest -> Packing -> Packs    (the last two only where nodes are split off)

Every stage is a pure function from one record to the next; nothing here imports another stage.
Arrays are numpy on the host. B is the number of requests, N the number of nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

# The two kinds of kernels that a decode step runs: ours over a plan, or "stock" ones: those of the
# SGLang backend that ours composes, the fallback (engine/fallback.py).
PREFIX, STOCK = "prefix", "stock"
# SGLang's names of fallbacks whose decode has a time model (predict/stock_time.py).
FLASHINFER, FA3 = "flashinfer", "fa3"
# Strategies of the profit model (plan/profit.py); every kernel's plans can have the last one.
CALIBRATED = "calibrated"
STRATEGIES = ("query", "naive", "compute", "pat", CALIBRATED)


class PlanTooLarge(RuntimeError):
    """The plan needs more workspace than the executor was made with."""


class HeadSizes(NamedTuple):
    """What compiled loops take of a HeadConfig."""

    num_qo_heads: int
    num_kv_heads: int
    group_size: int
    head_dim: int
    value_dim: int
    token_dim: int


@dataclass(frozen=True)
class HeadConfig:
    """Attention heads of one layer on one tensor-parallel rank.

    head_dim    elements of a query and of a key
    latent_dim  of absorbed multi-head latent attention, whose token is one row for its one KV head:
                the key, of which the first latent_dim elements are the value, too; None: keys and
                values are apart, and alike

    Raises ValueError when the query heads are no multiple of the KV heads, or a latent row is not
    for one KV head or shorter than its value.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    latent_dim: int | None = None

    def __post_init__(self):
        for name in ("num_qo_heads", "num_kv_heads", "head_dim", "latent_dim"):
            value = getattr(self, name)
            if name == "latent_dim" and value is None:
                continue
            if not isinstance(value, int) or value <= 0:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.num_qo_heads % self.num_kv_heads:
            raise ValueError(
                f"num_qo_heads ({self.num_qo_heads}) must be a multiple of num_kv_heads "
                f"({self.num_kv_heads})"
            )
        if self.latent_dim is not None and (
            self.num_kv_heads > 1 or self.latent_dim > self.head_dim
        ):
            raise ValueError(
                f"latent_dim ({self.latent_dim}) is for one KV head, not {self.num_kv_heads}, and "
                f"at most head_dim ({self.head_dim})"
            )

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head (GQA)."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def value_dim(self) -> int:
        """Elements of a value and of an output."""
        return self.latent_dim or self.head_dim

    @property
    def token_dim(self) -> int:
        """Elements of KV that a token has for one KV head."""
        return self.head_dim if self.latent_dim else 2 * self.head_dim

    @property
    def sizes(self) -> HeadSizes:
        return HeadSizes(
            self.num_qo_heads, self.num_kv_heads, self.group_size, self.head_dim, self.value_dim,
            self.token_dim,
        )  # fmt: skip

    @property
    def shape(self) -> str:
        """Name the heads in file names: query heads, KV heads and dimensions."""
        latent = f"-{self.latent_dim}" if self.latent_dim else ""
        return f"{self.num_qo_heads}-{self.num_kv_heads}-{self.head_dim}{latent}"

    def __str__(self) -> str:
        dims = f"{self.head_dim}, {self.latent_dim} latent" if self.latent_dim else self.head_dim
        return f"{self.num_qo_heads}/{self.num_kv_heads} heads of {dims}"


@dataclass(frozen=True)
class PathTable:
    """The prefix paths of a batch as a table of nodes.

    parent   int32 [N]  index of the parent node, -1 at a root; parents come before children
    length   int32 [N]  KV tokens that the node holds
    node_id  int64 [N]  the tree's own name for the node (for messages only)
    leaf     int32 [B]  deepest node of each request, -1 without a path
    seq_lens int32 [B]  KV tokens of each request, the token being decoded included

    The lengths along a request's path sum to less than its seq_len: the token being decoded is
    always private.
    """

    parent: np.ndarray
    length: np.ndarray
    node_id: np.ndarray
    leaf: np.ndarray
    seq_lens: np.ndarray

    @classmethod
    def of(cls, parent, length, leaf, seq_lens, node_id=None) -> PathTable:
        """Make one from sequences of integers; without node_id a node's name is its index."""
        return cls(
            parent=np.array(parent, np.int32),
            length=np.array(length, np.int32),
            node_id=np.array(range(len(parent)) if node_id is None else node_id, np.int64),
            leaf=np.array(leaf, np.int32),
            seq_lens=np.array(seq_lens, np.int32),
        )


@dataclass(frozen=True)
class Forest:
    """Nodes that at least two requests share; all else is the requests' private tails.

    parent      int32 [N]    parents come before children, -1 at a root
    start, end  int32 [N]    KV positions [start, end) that the node covers on its requests' rows
    num_queries int32 [N]    requests below the node
    tail_parent int32 [B]    node that the request's tail hangs below, -1 if it shares nothing
    tail_start  int32 [B]    first KV position of the tail, which ends at seq_len
    seq_lens    int32 [B]
    query_lens  int32 [B]    the request's newest tokens that attend, each to itself and to all
                             before it; None: one token each
    """

    parent: np.ndarray
    start: np.ndarray
    end: np.ndarray
    num_queries: np.ndarray
    tail_parent: np.ndarray
    tail_start: np.ndarray
    seq_lens: np.ndarray
    query_lens: np.ndarray | None = None

    @cached_property
    def unique_tokens(self) -> int:
        """KV tokens of the batch, each shared one counted once."""
        return int((self.end - self.start).sum() + (self.seq_lens - self.tail_start).sum())


@dataclass(frozen=True)
class Packing:
    """What the profit model decided: who absorbs the KV of the node above (PAT §5.1, scheme 2).

    node bool [N]  the node's pack also reads its parent's KV, so the parent's pack does without
                   the node's queries
    tail bool [B]  the same for the request's tail
    """

    node: np.ndarray
    tail: np.ndarray


@dataclass(frozen=True)
class Packs:
    """Queries that read one stretch of KV together, as the papers group them; plan/split_nodes.py
    makes items of those of nodes.

    kv_start, kv_end int32 [P]    KV positions; every query of the pack has the same slots there
    tail             int32 [P]    the request whose tail ends the pack (it grows), else -1
    query_offset     int32 [P+1]  CSR offsets into queries
    queries          int32 [...]  request of each query
    """

    kv_start: np.ndarray
    kv_end: np.ndarray
    tail: np.ndarray
    query_offset: np.ndarray
    queries: np.ndarray


@dataclass(frozen=True)
class PlanStats:
    """What one layer of a planned step reads, in KV tokens of all KV heads, and its parts."""

    num_nodes: int
    num_tiles: int
    num_items: int
    num_partials: int
    kv_tokens_read: int
    kv_tokens_query_centric: int
    kv_tokens_unique: int


@dataclass(frozen=True)
class Prediction:
    """Predicted microseconds per layer of both kernels."""

    stock_us: float
    prefix_us: float


@dataclass(frozen=True)
class Decision:
    """Which kernels run this decode step (PREFIX or STOCK) and why.

    predicted  what the choice rests on, None where it rests on nothing measured
    """

    variant: str
    reason: str
    predicted: Prediction | None = field(default=None, compare=False)
