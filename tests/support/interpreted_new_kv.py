"""New tokens written into a cache of float8_e4m3fn in Triton's interpreter, against torch; run by
test_new_kv.py."""

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from sgl_prefix_attn.execute.backends.new_kv import launch_store
from tests.support.problems import E4M3

NAN = 0x7F
# As torch has them, and their bits.
KINDS = {tl.bfloat16: (torch.bfloat16, torch.uint16), tl.float8e4nv: (E4M3, torch.uint8)}


@pytest.fixture(autouse=True)
def _to_nearest(monkeypatch):
    """Triton's interpreter rounds ties up, and the smallest numbers of e4m3 down; GPUs do not."""
    convert = interpreter._convert_float

    def as_torch_does(data, from_type, to_type, rounding):
        if to_type not in KINDS:
            return convert(data, from_type, to_type, rounding)
        assert from_type == tl.float32
        wide = torch.from_numpy(np.frombuffer(data.tobytes(), np.float32).copy())
        narrow, bits = KINDS[to_type]
        return wide.to(narrow).view(bits).numpy().reshape(data.shape)

    monkeypatch.setattr(interpreter, "_convert_float", as_torch_does)


def rounded(x, scale):
    """As torch divides by a scale that a GPU holds."""
    quotient = x.float() / torch.tensor(scale, dtype=x.dtype).float()
    return quotient.to(x.dtype).to(E4M3)


@pytest.mark.parametrize("apart", [1, 3])  # a column of a draft round's slots
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "heads", "dims", "scales"),
    [
        (1, 1, (64, 64), (1.0, 1.0)),
        (37, 7, (96, 64), (0.7, 1.7)),
        (5, 16, (128, 128), (0.013, 3.0)),
    ],
    ids=str,
)
def test_rows_of_a_packed_product(rows, heads, dims, scales, dtype, apart):
    generator = torch.Generator().manual_seed(rows)
    packed = torch.randn(rows, heads * sum(dims) + 8, generator=generator)
    packed[:, ::5] *= 2.0**-8  # small ones are rounded to steps of 2**-9
    packed = packed.clamp(-448 * min(scales), 448 * min(scales)).to(dtype)
    k, v = packed[:, 8:].split([heads * dim for dim in dims], dim=1)
    k, v = (x.view(rows, heads, dim) for x, dim in zip((k, v), dims, strict=True))
    before = packed.clone()
    caches = [torch.full((rows + 9, heads, dim), NAN, dtype=torch.uint8).view(E4M3) for dim in dims]
    slots = torch.randperm(rows + 9, generator=generator)[:rows]
    slots = torch.stack([slots, *[slots.flip(0)] * (apart - 1)], dim=1)[:, 0]
    assert rows == 1 or slots.stride(0) == apart
    launch_store(k, v, *caches, slots, *scales)
    assert torch.equal(packed, before)
    others = torch.ones(rows + 9, dtype=torch.bool).index_fill(0, slots, False)
    for cache, new, scale in zip(caches, (k, v), scales, strict=True):
        held = cache.view(torch.uint8)
        assert torch.equal(held[slots], rounded(new, scale).view(torch.uint8))
        assert (held[others] == NAN).all()
