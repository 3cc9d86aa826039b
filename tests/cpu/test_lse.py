"""LSE values that know their base."""

import math

import pytest
import torch

from sgl_prefix_attn.execute.lse import Lse, merge_states


def attention(logits, v):
    return torch.softmax(logits, -1) @ v, torch.logsumexp(logits, -1)


def halves(base, dtype=torch.float32):
    """Attention over all 24 keys, and over 7 and 17 of them: [2, 3, 8] each, LSE [2, 3]."""
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(2, 3, 1, 24, generator=generator, dtype=torch.float64)
    v = torch.randn(2, 3, 24, 8, generator=generator, dtype=torch.float64)
    results = []
    for part in (slice(0, 24), slice(0, 7), slice(7, 24)):
        out, lse = attention(logits[..., part], v[..., part, :])
        lse = Lse(lse.squeeze(-1).float(), "e").to_base(base)
        results += [out.squeeze(-2).to(dtype), lse]
    return results


@pytest.mark.parametrize("base", ["e", "2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_two_halves_is_attention_over_both(base, dtype):
    out, lse, out_a, lse_a, out_b, lse_b = halves(base, dtype)
    merged, merged_lse = merge_states(out_a, lse_a, out_b, lse_b)
    assert merged.dtype == dtype
    atol = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(merged.float(), out.float(), rtol=0, atol=atol)
    torch.testing.assert_close(merged_lse.values, lse.values, rtol=0, atol=1e-5)
    assert merged_lse.base == base


def test_mixing_bases_raises():
    """The weights of a base-2 LSE taken as natural would be plainly wrong."""
    out, _, out_a, lse_a, out_b, lse_b = halves("2")
    wrong, _ = merge_states(out_a, Lse(lse_a.values, "e"), out_b, Lse(lse_b.values, "e"))
    assert (wrong - out).abs().max() > 1e-2
    with pytest.raises(ValueError, match="lse_a is in base 2, lse_b in base e"):
        merge_states(out_a, lse_a, out_b, lse_b.to_base("e"))


def test_conversion():
    lse = Lse(torch.tensor([[3.0, -1.0]]), "2")
    natural = lse.to_base("e")
    torch.testing.assert_close(natural.values, lse.values * math.log(2))
    torch.testing.assert_close(natural.to_base("2").values, lse.values)
    assert natural.base == "e" and lse.to_base("2") is lse


@pytest.mark.parametrize("base", ["10", 2, None, ""])
def test_unknown_base(base):
    with pytest.raises(ValueError, match="base must be one of"):
        Lse(torch.zeros(1, 1), base)
    with pytest.raises(ValueError, match="base must be one of"):
        Lse(torch.zeros(1, 1), "e").to_base(base)


def test_nothing_attended_on_one_side_or_both():
    out_a, lse_a = torch.randn(2, 3, 8), Lse(torch.randn(2, 3), "2")
    nothing = Lse(torch.full((2, 3), -math.inf), "2")
    merged, lse = merge_states(out_a, lse_a, torch.zeros(2, 3, 8), nothing)
    torch.testing.assert_close(merged, out_a)
    torch.testing.assert_close(lse.values, lse_a.values)
    merged, lse = merge_states(torch.zeros(2, 3, 8), nothing, torch.zeros(2, 3, 8), nothing)
    assert (merged == 0).all() and (lse.values == -math.inf).all()
