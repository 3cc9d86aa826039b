"""Attention problems over poisoned memory, and how exact their answer must be."""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from sgl_prefix_attn.execute.params import LayerParams
from sgl_prefix_attn.records import HeadConfig, PathTable
from tests.support.forests import chain


@dataclass
class Problem:
    """A batch with its KV: NaN in every slot that no request uses, in slot 0 (SGLang's padding) and
    in the last slot, which stands behind the end of every row of req_to_token."""

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

    @property
    def poison_slot(self) -> int:
        return self.k.shape[0] - 1

    def layer(self, out: torch.Tensor, **changed) -> LayerParams:
        """The problem's one layer, written to `out`."""
        params = LayerParams(
            self.q, self.k, self.v, self.seq_lens, out, None, self.sm_scale, self.soft_cap
        )
        return replace(params, **changed)

    def grow(self, generator: torch.Generator) -> torch.Tensor:
        """Every request one token longer; returns out_cache_loc [B]."""
        slots = self.last_slots(1)
        for cache in (self.k, self.v):
            values = torch.randn(slots.numel(), *cache.shape[1:], generator=generator)
            cache[slots] = values.to(cache)
        self.q = torch.randn(self.q.shape, generator=generator).to(self.q)
        self.seq_lens = self.seq_lens + 1
        return slots

    def last_slots(self, ahead: int = 0) -> torch.Tensor:
        """Slots [B] of the newest token of each request, or of those that come after it."""
        return self.req_to_token[self.pool, self.seq_lens.long() - 1 + ahead].long()


def make_problem(
    paths: PathTable, heads: HeadConfig, dtype=torch.float32, *, page_size=1, soft_cap=0.0,
    room=20, seed=0, device="cpu",
) -> Problem:  # fmt: skip
    """Slots in pages of random order, rows of req_to_token in random order, random q, k and v.

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
    for _ in range(2):
        values = torch.full((num_slots, heads.num_kv_heads, heads.head_dim), math.nan, dtype=dtype)
        values[used] = torch.randn(
            used.numel(), heads.num_kv_heads, heads.head_dim, generator=generator
        ).to(dtype)
        cache.append(values)
    q = torch.randn(batch, heads.num_qo_heads, heads.head_dim, generator=generator).to(dtype)
    return Problem(
        paths=paths, heads=heads, dtype=dtype, soft_cap=soft_cap,
        # logits of standard deviation 1.5: peaked enough that one token matters
        sm_scale=1.5 * heads.head_dim**-0.5,
        q=q.to(device), k=cache[0].to(device), v=cache[1].to(device),
        req_to_token=torch.from_numpy(req_to_token).to(device),
        pool=torch.from_numpy(pool.astype(np.int64)).to(device),
        seq_lens=torch.from_numpy(paths.seq_lens.copy()).to(device),
    )  # fmt: skip


def plain_attention(problem: Problem, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(q k / s) v, request by request, every step in `dtype`; out and LSE in base 2."""
    heads = problem.heads
    outs, lses = [], []
    for row in range(problem.seq_lens.numel()):
        slots = problem.req_to_token[problem.pool[row], : int(problem.seq_lens[row])].long()
        q = problem.q[row].to(dtype).view(heads.num_kv_heads, heads.group_size, heads.head_dim)
        k = problem.k[slots].to(dtype).transpose(0, 1)
        v = problem.v[slots].to(dtype).transpose(0, 1)
        logits = q @ k.transpose(1, 2) * problem.sm_scale
        if problem.soft_cap:
            logits = problem.soft_cap * torch.tanh(logits / problem.soft_cap)
        outs.append((torch.softmax(logits, -1) @ v).flatten(0, 1))
        lses.append(torch.logsumexp(logits, -1).flatten() / math.log(2))
    return torch.stack(outs), torch.stack(lses)


def assert_attention(problem: Problem, out: torch.Tensor, lse: torch.Tensor | None = None) -> None:
    """out and lse are full attention, to the error that torch itself makes in the model's dtype.

    The bound is 2 x that error, because a plan sums the same terms in another order and rounds
    its result once more, and besides what any method must be allowed on the smallest cases, where
    torch's error happens to be 0: one rounding of the output in its dtype, and for each of the two
    subtractions of an LSE (softmax, merge) that LSE's float32 rounding, which scales the weights.
    """
    want, want_lse = plain_attention(problem, torch.float64)
    torch_out, torch_lse = plain_attention(problem, problem.dtype)
    assert out.dtype == problem.dtype and not out.isnan().any()
    eps, eps32 = torch.finfo(problem.dtype).eps, torch.finfo(torch.float32).eps
    top = want.abs().max()
    lse_rounding = 4 * eps32 * (1 + want_lse.abs().max())
    bound = 2 * (torch_out - want).abs().max() + top * (eps + lse_rounding)
    error = (out.double() - want).abs().max()
    assert error <= bound, f"output is {error:.3g} off, bound {bound:.3g}"
    if lse is not None:
        assert lse.dtype == torch.float32
        bound = 2 * (torch_lse - want_lse).abs().max() + lse_rounding
        error = (lse.double() - want_lse).abs().max()
        assert error <= bound, f"LSE is {error:.3g} off, bound {bound:.3g}"
