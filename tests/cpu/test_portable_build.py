"""The portable kernel, compiled without a GPU for each architecture: what ptxas made of it."""

from __future__ import annotations

import re

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sgl_prefix_attn.kernels.portable.portable_options import (
    portable_config,
    portable_constants,
    portable_options,
)
from sgl_prefix_attn.kernels.portable.tile_attention import row_tile_portable_kernel
from tests.support.builds import SPILL, disassembled, loops_of, signature_of

pytestmark = pytest.mark.usefixtures("compiled_once")

# KiB of shared memory of an SM, of which each CTA's driver takes one
SHARED_MEMORY = {80: 164, 89: 100, 90: 228, 100: 228, 120: 100}
PRODUCT = re.compile(r"\b(?:HMMA|HGMMA|UTC\w*MMA)\b")


def build(arch, heads, group, head_dim, dtype="bf16", kv_dtype=None, **flags):
    config = portable_config(group, head_dim)
    constants = portable_constants(
        heads,
        group,
        head_dim,
        config,
        **{"has_cap": False, "has_lse": False, "has_sink": False, **flags},
    )
    source = ASTSource(row_tile_portable_kernel, *signature_of(constants, dtype, kv_dtype))
    target = GPUTarget("cuda", arch, 32)
    return config, triton.compile(source, target=target, options=portable_options(config))


def block_loops(sass):
    """The innermost loops that multiply."""
    text, found = loops_of(sass)
    found = [(a, b) for a, b in set(found) if PRODUCT.search(text[a:b])]
    inner = [
        (a, b) for a, b in found
        if not any((c, d) != (a, b) and a <= c and d <= b for c, d in found)
    ]  # fmt: skip
    return [text[a:b] for a, b in sorted(inner)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "flags"),
    [
        *((arch, {}) for arch in SHARED_MEMORY),
        (80, {"has_sink": True}),
        (90, {"has_sink": True}),
        (80, {"invariant": True}),
        (90, {"invariant": True}),
    ],
    ids=str,
)
def test_no_spills_in_the_loops_and_as_many_ctas_as_planned(arch, flags, tmp_path):
    config, compiled = build(arch, 8, 4, 128, **flags)
    assert config.ctas * (compiled.metadata.shared + 1024) <= SHARED_MEMORY[arch] * 1024
    loops = block_loops(disassembled(compiled, tmp_path)[0])
    # invariant: for all rows, and the same without what is not finite
    assert len(loops) >= 2, "one for few rows, one for many"
    for loop in loops:
        assert not SPILL.search(loop), "registers are spilled"
        assert "LDGSTS.E.BYPASS" in loop, "rows are not copied beside products"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "head_dim", "dtype"),
    [
        *((arch, 128, "bf16") for arch in SHARED_MEMORY if arch > 80),
        (89, 64, "fp16"),
        (90, 64, "bf16"),
    ],
)
def test_e4m3_is_converted_in_the_loops(arch, head_dim, dtype, tmp_path):
    config, compiled = build(arch, 8, 4, head_dim, dtype, "fp8e4nv")
    assert config.ctas * (compiled.metadata.shared + 1024) <= SHARED_MEMORY[arch] * 1024
    sass, _ = disassembled(compiled, tmp_path)
    assert len(SPILL.findall(sass)) <= 8, "more than what an item begins and ends with"
    for loop in sorted(block_loops(sass), key=len)[:2]:  # for few rows, for many
        assert not SPILL.search(loop), "registers are spilled"
        assert "F2FP.F16.E4M3.UNPACK_B" in loop
        assert "LDGSTS.E.BYPASS.128" in loop, "rows are not copied beside products"
