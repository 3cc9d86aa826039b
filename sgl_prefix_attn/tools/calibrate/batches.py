"""Random decode batches of the trace families of PersistentKV (§3.5), and with shared prefixes.

The same seed gives the same batches: calibration and held-out evaluation differ in nothing but it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.records import PathTable
from sgl_prefix_attn.tools.explain.tree import Tree

# Families of lengths: how KV tokens of requests are drawn.
LENGTHS: dict[str, Callable[[np.random.Generator, int, int], np.ndarray]] = {
    "homogeneous": lambda rng, size, mean: np.full(size, mean),
    "bucketed": lambda rng, size, mean: mean * rng.choice([0.25, 0.5, 1.0, 2.0], size),
    "bimodal": lambda rng, size, mean: np.where(rng.random(size) < 0.8, mean / 4, mean * 4),
    "uniform": lambda rng, size, mean: rng.uniform(0, 2 * mean, size),
    "zipf": lambda rng, size, mean: mean * np.clip(rng.zipf(1.5, size), 1, 64) / 4,
}
SHARING = ("none", "prompt", "groups", "levels")
MAX_BATCH = 256
_TRIES = 1000  # of one batch, until it fits the pool
SHORTEST, LONGEST = 64, 65536  # KV tokens of a request


@dataclass(frozen=True)
class Batch:
    """A decode batch: name is "lengths/sharing", tokens are what a query-centric kernel reads,
    unique_tokens counts each shared one once."""

    name: str
    paths: PathTable

    @property
    def size(self) -> int:
        return self.paths.seq_lens.size

    @property
    def tokens(self) -> int:
        return int(self.paths.seq_lens.sum())

    @property
    def unique_tokens(self) -> int:
        return build_forest(self.paths).unique_tokens

    @property
    def shared_share(self) -> float:
        """Share of the KV that a query-centric kernel reads more than once."""
        return 1 - self.unique_tokens / self.tokens


def prefix_lens(paths: PathTable) -> np.ndarray:
    """Return int64 [B]: KV tokens on each request's path."""
    depth = np.zeros(paths.length.size + 1, np.int64)  # the last one: no path
    for node in range(paths.length.size):  # parents come first
        depth[node] = paths.length[node] + depth[paths.parent[node]]
    return depth[paths.leaf]


def draw(seed: int, count: int, pool_tokens: int, page_size: int = 1) -> list[Batch]:
    """Draw `count` batches that fit pool_tokens; every family occurs equally often.

    Batch sizes (1 to 256) and mean lengths (64 to 64K tokens) are log-uniform, the shared share of
    a request uniform in 0 to 95 %. Nodes are multiples of page_size long, as in SGLang's tree.
    Raises ValueError for a pool that hardly any batch of a drawn size fits.
    """
    rng = np.random.default_rng(seed)
    families = [(a, b) for b in SHARING for a in LENGTHS]
    batches = []
    for i in range(count):
        lengths, sharing = families[i % len(families)]
        size = _log_uniform(rng, 1 if sharing == "none" else 2, MAX_BATCH)
        for _ in range(_TRIES):
            mean = _log_uniform(rng, SHORTEST, LONGEST)
            paths = _draw_one(rng, lengths, sharing, size, mean, page_size)
            batch = Batch(f"{lengths}/{sharing}", paths)
            if batch.unique_tokens + batch.size * page_size <= pool_tokens:
                break
        else:
            raise ValueError(f"pool_tokens {pool_tokens} is too small for {size} requests")
        batches.append(batch)
    return batches


def _draw_one(rng, lengths: str, sharing: str, size: int, mean: int, page_size: int) -> PathTable:
    if sharing == "none":
        private = np.maximum(SHORTEST, _lengths(rng, lengths, size, mean))
        return PathTable.of([], [], np.full(size, -1), private)
    share = rng.uniform(0, 0.95)
    levels = {"prompt": 1, "groups": 1, "levels": int(rng.integers(2, 5))}[sharing]
    # Nodes of a level; each request hangs below one of the last level, those below theirs evenly.
    counts = [1]
    if sharing == "groups":
        counts = [int(rng.integers(1, max(2, size // 2 + 1)))]
    for _ in range(levels - 1):
        counts.append(min(size, counts[-1] * _log_uniform(rng, 1, 16)))
    parts = rng.dirichlet(np.ones(levels)) * share * mean
    parts = np.maximum(page_size, parts // page_size * page_size).astype(np.int64)
    shared = Tree((*counts, size), (*parts.tolist(), 0)).paths()
    leaf = rng.permutation(shared.leaf)
    private = _lengths(rng, lengths, size, max(1, round((1 - share) * mean)))
    return PathTable.of(shared.parent, shared.length, leaf, shared.seq_lens + private)


def _lengths(rng, family: str, size: int, mean: int) -> np.ndarray:
    """Draw KV tokens of each request, about `mean` on average."""
    return np.clip(LENGTHS[family](rng, size, mean), 1, LONGEST).astype(np.int64)


def _log_uniform(rng, low: int, high: int) -> int:
    return int(round(np.exp(rng.uniform(np.log(low), np.log(high)))))
