"""The decode batches of the papers' kernel experiments, one pure function per experiment.

Lengths count the token being decoded. A batch of growing requests is taken in the middle: a time
per step that is linear in the length has its mean there.
"""

from __future__ import annotations

import numpy as np

from eval.bench_kernel.trees import Tree
from sgl_prefix_attn.records import PathTable
from sgl_prefix_attn.tools.calibrate.batches import Batch

# Mean prompt and answer in tokens and the spread of their logarithms. Alpaca: PagedAttention's
# section 6.1; LMSYS: its data card. PackInfer gives no lengths of Text2SQL: schemas of 16
# databases, with short questions and queries below, are an assumption, and so is every spread.
_MIXES = {"alpaca": (19.31, 58.45, 0.8), "lmsys": (69.5, 214.5, 1.3), "text2sql": (40, 60, 0.5)}
_SCHEMAS, _SCHEMA = 16, 600
# KV tokens of PersistentKV's bimodal step of 8 requests: 550.5 MB of 4 KB (its Table 3).
_STEP_TOKENS = 134_400


def trees(*texts: str) -> tuple[Batch, ...]:
    """Make batches of prefix trees, COUNTS_LENGTHS."""
    return tuple(Batch(text, Tree.parse(text).paths()) for text in texts)


def unshared(name: str, lengths) -> Batch:
    """Make a batch of requests of so many KV tokens each, int [B], that share nothing."""
    lengths = np.asarray(lengths)
    return Batch(name, PathTable.of([], [], np.full(lengths.size, -1), lengths))


def mixes() -> tuple[Batch, ...]:
    """PackInfer's loads, and each with its tokens in requests of one length (its Figure 1)."""
    loads = (("alpaca", 256), ("lmsys", 64), ("lmsys", 256), ("text2sql", 256))
    return tuple(
        Batch(f"{name} {size}{suffix}", _mix(name, size, even))
        for name, size in loads
        for suffix, even in (("", False), (" even", True))
    )


def _mix(name: str, size: int, even: bool):
    prompt, answer, spread = _MIXES[name]
    rng = np.random.default_rng(0)
    mean = -(spread**2) / 2  # of the logarithm, for a mean of 1
    own = prompt * rng.lognormal(mean, spread, size)
    own += answer * rng.lognormal(mean, spread, size) * rng.random(size)
    own = np.maximum(1, own.round()).astype(np.int64)
    if even:
        own = own.sum() // size + (np.arange(size) < own.sum() % size)
    if name != "text2sql":
        return PathTable.of([], [], np.full(size, -1), own)
    roots, leaf = [-1] * _SCHEMAS, np.arange(size) % _SCHEMAS
    return PathTable.of(roots, [_SCHEMA] * _SCHEMAS, leaf, _SCHEMA + own)


def active_sets() -> tuple[Batch, ...]:
    """Active sets of PersistentKV's trace families (section 3.8) of 1, 4 and 8 requests.

    The bimodal set of 8 has the KV bytes of its Table 3, two requests in eight being long; uniform
    and Zipf-like sets have as many. The paper gives no lengths but 8K to 64K of `bucketed` and 32K
    of `homogeneous`.
    """
    rank = np.arange(1, 9)
    zipf = (_STEP_TOKENS / (1 / rank).sum() / rank).astype(np.int64)
    zipf[0] += _STEP_TOKENS - zipf.sum()
    return (
        unshared("bucketed 1", [16384]), unshared("bimodal 4", [8120, 8192, 8264, 42624]),
        unshared("bimodal 8", [8072, 8120, 8168, 8216, 8264, 8312, 42600, 42648]),
        unshared("uniform 8", _STEP_TOKENS * (2 * rank - 1) // 64), unshared("zipf 8", zipf),
        unshared("homogeneous 4", [32768] * 4), unshared("homogeneous 8", [32768] * 8),
    )  # fmt: skip


def completing(shared: int, completion: int = 64, batch: int = 32, prompt: int = 2048) -> str:
    """Write requests of a prompt, of which `shared` tokens are common, halfway through their
    completion, as a tree."""
    own = prompt - shared + completion // 2
    return f"1,{batch}_{shared},{own}" if shared else f"{batch}_{own}"
