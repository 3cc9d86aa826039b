"""What kernels round is never taken for a fault."""

import math
import random

import pytest
import torch

from sgl_prefix_attn.execute.rounding import why_wrong


def scores(q, k, scale, soft_cap) -> torch.Tensor:
    """[Hkv, group, tokens] of q [Hkv, group, D] and k [tokens, Hkv, D]."""
    found = torch.einsum("hgd,thd->hgt", q, k) * scale
    return soft_cap * torch.tanh(found / soft_cap) if soft_cap else found


def as_torch(q, k, v, options, dtype, rounded_to) -> torch.Tensor:
    """Attention in `dtype`, probabilities and results rounded; [1, Hq, D]."""
    weights = torch.softmax(scores(q.to(dtype), k.to(dtype), *options), -1)
    weights = weights.to(rounded_to).to(dtype)
    return torch.einsum("hgt,thd->hgd", weights, v.to(dtype)).to(rounded_to).flatten(0, 1)[None]


def as_kernels(q, k, v, options, parts, ahead, generator) -> torch.Tensor:
    """What tensor cores do: scores and exponentials a few float32 places off, probabilities up to
    2^ahead in the dtype, partial results in float16 with a scale."""

    def blur(x):
        return x * (1 + (torch.rand(x.shape, generator=generator) * 2 - 1) * 2**-22)

    logits = blur(scores(q.float(), k.float(), *options)) / math.log(2)
    outs, lses = [], []
    for i in range(parts):
        part = slice(i * len(k) // parts, (i + 1) * len(k) // parts)
        top = logits[..., part].amax(-1, keepdim=True) - ahead
        weights = blur(torch.exp2(logits[..., part] - top))
        total = weights.sum(-1, keepdim=True)
        values = torch.einsum("hgt,thd->hgd", weights.to(q.dtype).float(), v[part].float())
        out = values / total
        if parts > 1 and q.dtype != torch.float32:
            row = out.abs().amax(-1, keepdim=True)
            out = (out / row).half().float() * row
        outs.append(out)
        lses.append(total.log2() + top)
    weights = torch.softmax(torch.stack(lses) * math.log(2), 0)
    return (weights * torch.stack(outs)).sum(0).to(q.dtype).flatten(0, 1)[None]


@pytest.mark.parametrize(("off", "is_wrong"), [(1.4, False), (1.6, True)])
def test_all_heads_of_two_outputs_may_not_be_as_far_off_as_one(off, is_wrong):
    want = torch.ones(2, 4, 16)
    one, every = want.clone(), want.clone()
    one[1, 2] *= 1 + 1.9 * torch.finfo(torch.float32).eps
    every[1] *= 1 + off * (torch.finfo(torch.float32).eps * 65)
    assert why_wrong(one, want) is None
    assert (why_wrong(every, want) is not None) == is_wrong


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_kernels_round_less_than_is_allowed(dtype):
    """Of any heads, lengths, splits and peaks; V with a mean in common in one case of four."""
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    for _ in range(150):
        tokens = rng.choice([1, 2, 3, 5, 8, 17, 63, 64, 130, 700])
        num_kv_heads, group = rng.choice([1, 2, 8]), rng.choice([1, 4, 7, 8])
        head_dim = rng.choice([64, 128, 256])
        q, k, v = (
            torch.randn(*shape, head_dim, generator=generator)
            for shape in ((num_kv_heads, group), *((tokens, num_kv_heads),) * 2)
        )
        if rng.random() < 0.25:
            v = 0.2 * v + torch.randn(num_kv_heads, head_dim, generator=generator)
        q, k, v = (x.to(dtype) for x in (q, k, v))
        options = rng.choice([0.3, 1.5, 4.0]) * head_dim**-0.5, rng.choice([0.0, 5.0, 30.0])
        want = as_torch(q, k, v, options, torch.float64, torch.float64)
        low = as_torch(q, k, v, options, torch.float32, dtype)
        one, other = (
            as_kernels(
                q, k, v, options, min(tokens, rng.choice([1, 2, 5, 16])), rng.choice([0, 8]),
                generator,
            )
            for _ in range(2)
        )  # fmt: skip
        case = tokens, num_kv_heads, group, head_dim, options
        assert why_wrong(one, want, low) is None and why_wrong(one, other) is None, case
        assert why_wrong(low, want, low) is None and why_wrong(one, low) is None, case
