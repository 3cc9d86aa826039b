"""Attention problems over poisoned memory, and how exact their answer must be."""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from sgl_prefix_attn.execute.params import LayerParams
from sgl_prefix_attn.execute.rounding import why_wrong
from sgl_prefix_attn.records import HeadConfig, PathTable
from tests.support.forests import chain

E4M3 = torch.float8_e4m3fn
# Of its keys and values: the caches have numbers of all sizes, subnormal ones too.
E4M3_SCALES = (0.37, 2.6)


@dataclass
class Problem:
    """A batch with its KV: NaN in every slot that no request uses, in slot 0 (SGLang's padding) and
    in the last slot, which stands behind the end of every row of req_to_token. v: a view of k where
    that is latent. sinks: [Hq].
    k_scale, v_scale: what the caches are multiplied by; of float8_e4m3fn they are not 1."""

    paths: PathTable
    heads: HeadConfig
    dtype: torch.dtype
    soft_cap: float
    sm_scale: float
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    req_to_token: torch.Tensor
    pool: torch.Tensor
    seq_lens: torch.Tensor
    sinks: torch.Tensor | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0

    @property
    def poison_slot(self) -> int:
        return self.k.shape[0] - 1

    def slots(self) -> list[torch.Tensor]:
        """Slots of each request's tokens, in order."""
        rows = zip(self.pool, self.seq_lens.tolist(), strict=True)
        return [self.req_to_token[pool, :length].long() for pool, length in rows]

    def of_rows(self, rows: list[int]) -> "Problem":
        """The same for some of the requests alone; `paths` stay those of all."""
        return replace(self, q=self.q[rows], pool=self.pool[rows], seq_lens=self.seq_lens[rows])

    def layer(self, out: torch.Tensor, **changed) -> LayerParams:
        """The problem's one layer, written to `out`."""
        params = LayerParams(
            self.q, self.k, self.v, out, None, self.sm_scale, self.soft_cap,
            self.sinks, self.k_scale, self.v_scale,
        )  # fmt: skip
        return replace(params, **changed)

    def grow(self, generator: torch.Generator) -> torch.Tensor:
        """Every request one token longer; returns out_cache_loc [B]."""
        slots = self.last_slots(1)
        for cache, scale in ((self.k, self.k_scale), (self.v, self.v_scale)):
            values = torch.randn(slots.numel(), *cache.shape[1:], generator=generator)
            cache[slots] = (values / scale).to(cache)
        self.q = torch.randn(self.q.shape, generator=generator).to(self.q)
        self.seq_lens = self.seq_lens + 1
        return slots

    def last_slots(self, ahead: int = 0) -> torch.Tensor:
        """Slots [B] of the newest token of each request, or of those that come after it."""
        return self.req_to_token[self.pool, self.seq_lens.long() - 1 + ahead].long()


def make_problem(
    paths: PathTable, heads: HeadConfig, dtype=torch.float32, *, kv_dtype=None, page_size=1,
    soft_cap=0.0, room=20, seed=0, device="cpu",
) -> Problem:  # fmt: skip
    """Slots in pages of random order, rows of req_to_token in random order, random q, k and v.
    kv_dtype: E4M3, or None for caches like q.

    Node lengths are used as they are: with pages, make them multiples of page_size.
    """
    rng = np.random.default_rng(seed)
    batch = paths.leaf.size
    node_pages = -(-paths.length // page_size)
    tail_len = [paths.seq_lens[i] - sum(paths.length[chain(paths, i)]) for i in range(batch)]
    tail_pages = [-(-(int(n) + room) // page_size) for n in tail_len]
    total = int(node_pages.sum()) + sum(tail_pages)
    pages = iter((1 + rng.permutation(total + 2)).tolist())  # page 0 stays padding
    slots_of = {}
    of_tails = ((~i, n) for i, n in enumerate(tail_pages))
    for key, count in [*enumerate(node_pages.tolist()), *of_tails]:
        starts = np.array([next(pages) for _ in range(count)], np.int64)
        slots_of[key] = (starts[:, None] * page_size + np.arange(page_size)).reshape(-1)
    num_slots = (total + 3) * page_size + 1
    pool = rng.permutation(batch + 2)[:batch]
    columns = int(paths.seq_lens.max()) + room + page_size
    req_to_token = np.full((batch + 2, columns), num_slots - 1, np.int32)
    used = []
    for row in range(batch):
        nodes = [slots_of[node][: paths.length[node]] for node in chain(paths, row)]
        slots = np.concatenate([*nodes, slots_of[~row]])[: paths.seq_lens[row] + room]
        req_to_token[pool[row], : slots.size] = slots
        used.append(slots[: paths.seq_lens[row]])
    used = torch.from_numpy(np.unique(np.concatenate(used)))
    generator = torch.Generator().manual_seed(seed)
    cache = []
    scales = (1.0, 1.0) if kv_dtype is None else E4M3_SCALES
    for scale in scales[: 1 if heads.latent_dim else 2]:
        values = torch.full((num_slots, heads.num_kv_heads, heads.head_dim), math.nan)
        values = values.to(kv_dtype or dtype)
        values[used] = (
            torch.randn(used.numel(), heads.num_kv_heads, heads.head_dim, generator=generator)
            / scale
        ).to(values)
        cache.append(values.to(device))
    k, v = cache[0], values_of(cache[0], heads) if heads.latent_dim else cache[1]
    q = torch.randn(batch, heads.num_qo_heads, heads.head_dim, generator=generator).to(dtype)
    return Problem(
        paths=paths, heads=heads, dtype=dtype, soft_cap=soft_cap,
        # logits of standard deviation 1.5: peaked enough that one token matters
        sm_scale=1.5 * heads.head_dim**-0.5,
        q=q.to(device), k=k, v=v,
        req_to_token=torch.from_numpy(req_to_token).to(device),
        pool=torch.from_numpy(pool.astype(np.int64)).to(device),
        seq_lens=torch.from_numpy(paths.seq_lens.copy()).to(device),
        k_scale=scales[0], v_scale=scales[1],
    )  # fmt: skip


def values_of(k: torch.Tensor, heads: HeadConfig) -> torch.Tensor:
    """The values [slots, 1, latent_dim] in a cache of latent rows."""
    return k[..., : heads.latent_dim]


def attend(
    problem: Problem, row: int, slots: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(q k / s) v of a row's query over some slots; out [Hq, Dv] and LSE [Hq] in base 2.

    Everything in float64, or as tensor cores compute: in float32, with probabilities and results
    rounded to `dtype`.
    """
    heads = problem.heads
    exact = torch.promote_types(dtype, torch.float32)
    q = problem.q[row].to(exact).view(heads.num_kv_heads, heads.group_size, heads.head_dim)
    k = problem.k[slots].to(exact).transpose(0, 1) * problem.k_scale
    v = problem.v[slots].to(exact).transpose(0, 1) * problem.v_scale
    logits = q @ k.transpose(1, 2) * problem.sm_scale
    if problem.soft_cap:
        logits = problem.soft_cap * torch.tanh(logits / problem.soft_cap)
    if problem.sinks is not None:
        last = problem.sinks.to(exact).view(heads.num_kv_heads, heads.group_size, 1)
        logits = torch.cat([logits, last], -1)
    weights = torch.softmax(logits, -1)[..., : slots.numel()].to(dtype).to(exact)
    out = (weights @ v).flatten(0, 1).to(dtype)
    return out, torch.logsumexp(logits, -1).flatten() / math.log(2)


def plain_attention(problem: Problem, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """attend() of every request to all of its slots: out [B, Hq, Dv] and LSE [B, Hq]."""
    rows = [attend(problem, row, slots, dtype) for row, slots in enumerate(problem.slots())]
    outs, lses = zip(*rows, strict=True)
    return torch.stack(outs), torch.stack(lses)


def assert_attention(problem: Problem, out: torch.Tensor, lse: torch.Tensor | None = None) -> None:
    """out and lse are full attention, to the error that torch makes on the same request and head.

    Twice that error for an LSE, and what any method must be allowed where torch's happens to be 0:
    the float32 rounding of both subtractions of an LSE (softmax, merge) and of its scores, and a
    share of the dtype's that is lost in the output's, because kernels take other logarithms.
    Tensor cores add products sixteen at a time and cut off what is below the largest one's last
    bit, which in an emulation takes a score's last 5, 11 and 21 eps at head dims 64, 128 and 256.
    Products of e4m3 numbers they add 32 at a time, and keep 13 bits of them and of their sum.
    """
    want, want_lse = plain_attention(problem, torch.float64)
    low, low_lse = plain_attention(problem, problem.dtype)
    assert out.dtype == problem.dtype
    wrong = why_wrong(out, want, low)
    assert wrong is None, wrong
    if lse is not None:
        assert lse.dtype == torch.float32
        steps = 4 + problem.heads.head_dim / 12
        rounding = steps * torch.finfo(torch.float32).eps * (1 + want_lse.abs())
        if problem.k.dtype == E4M3:
            rounding += problem.heads.head_dim / 32 * 2**-13 * (1 + want_lse.abs())
        bound = 2 * (low_lse - want_lse).abs() + rounding + torch.finfo(problem.dtype).eps / 4
        error = (lse.double() - want_lse).abs()
        assert (error <= bound).all(), f"an LSE is {error.max():.3g} off"
