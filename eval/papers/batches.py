"""The decode batches of the papers' kernel experiments, one pure function per experiment.

Lengths count the token being decoded. A batch of growing requests is taken in the middle: a time
per step that is linear in the length has its mean there.
"""

from __future__ import annotations

import numpy as np

from eval.bench_kernel.trees import PAT20, Tree
from sgl_prefix_attn.calibrate.batches import Batch, path_table

# Mean prompt and answer in tokens and the spread of their logarithms. Alpaca: PagedAttention's
# section 6.1; LMSYS: its data card. PackInfer gives no lengths of Text2SQL: schemas of 16
# databases, with short questions and queries below, are an assumption, and so is every spread.
_MIXES = {"alpaca": (19.31, 58.45, 0.8), "lmsys": (69.5, 214.5, 1.3), "text2sql": (40, 60, 0.5)}
_SCHEMAS, _SCHEMA = 16, 600
# KV tokens of PersistentKV's bimodal step of 8 requests: 550.5 MB of 4 KB (its Table 3).
_STEP_TOKENS = 134_400
_INPUT = 512  # prompt of the prefetch paper's requests


def trees(*texts: str) -> tuple[Batch, ...]:
    """Make batches of prefix trees, COUNTS_LENGTHS."""
    return tuple(Batch(text, Tree.parse(text).paths()) for text in texts)


def unshared(name: str, lengths) -> Batch:
    """Make a batch of requests of so many KV tokens each, int [B], that share nothing."""
    lengths = np.asarray(lengths)
    return Batch(name, path_table([], np.full(lengths.size, -1), 0, lengths))


def pat() -> tuple[Batch, ...]:
    """PAT's trees (section 8.3)."""
    return trees(*PAT20)


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
        return path_table([], np.full(size, -1), 0, own)
    nodes = [(-1, _SCHEMA)] * _SCHEMAS
    return path_table(nodes, np.arange(size) % _SCHEMAS, np.full(size, _SCHEMA), own)


def single() -> tuple[Batch, ...]:
    """One request of PersistentKV's Table 1."""
    return trees("1_8192", "1_32768", "1_65536")


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
        unshared("bucketed 1", [16384]),
        unshared("bimodal 4", [8120, 8192, 8264, 42624]),
        unshared("bimodal 8", [8072, 8120, 8168, 8216, 8264, 8312, 42600, 42648]),
        unshared("uniform 8", _STEP_TOKENS * (2 * rank - 1) // 64),
        unshared("zipf 8", zipf),
        unshared("homogeneous 4", [32768] * 4),
        unshared("homogeneous 8", [32768] * 8),
    )


def completing(prompt: int, shared: int, completion: int, batch: int) -> str:
    """Write requests of a prompt, of which `shared` tokens are common, halfway through their
    completion, as a tree."""
    own = prompt - shared + completion // 2
    return f"1,{batch}_{shared},{own}" if shared else f"{batch}_{own}"


def chunk_prefixes() -> tuple[Batch, ...]:
    """Prompts of ChunkAttention's Table 3: none, half and all of them shared, 32 requests."""
    return trees(
        *(completing(n, n * part // 2, 64, 32) for n in (1024, 2048, 4096) for part in range(3))
    )


def chunk_completions() -> tuple[Batch, ...]:
    """Completions of ChunkAttention's Figure 3, with the prompt shared and with copies of it."""
    return trees(*(completing(2048, part, n, 32) for n in (512, 2048) for part in (2048, 0)))


def chunk_sizes() -> tuple[Batch, ...]:
    """Batch sizes of ChunkAttention's Figure 4."""
    return trees(*(completing(2048, 2048, 64, batch) for batch in (16, 32, 64, 96)))


def outputs() -> tuple[Batch, ...]:
    """Batch sizes and output lengths of the prefetch paper's Figure 4, thinned."""
    return trees(
        *(completing(_INPUT, 0, n, batch) for n in (512, 2048, 8192) for batch in (1, 16, 128))
    )


def sampled() -> tuple[Batch, ...]:
    """The batch of the prefetch paper's Table 3, halfway: 64 requests with 4096 tokens out."""
    return trees(completing(_INPUT, 0, 4096, 64))
