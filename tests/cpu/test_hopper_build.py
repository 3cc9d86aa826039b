"""The row-tile kernel, compiled for Hopper without a GPU: what ptxas made of it."""

from __future__ import annotations

import re

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from sgl_prefix_attn.kernels import words as W
from sgl_prefix_attn.kernels.hopper.attention import row_tile_kernel
from sgl_prefix_attn.kernels.hopper.build_options import (
    CONFIGS,
    NARROW_CONFIGS,
    compiler_options,
    kernel_constants,
)
from sgl_prefix_attn.kernels.hopper.e4m3_blocks import most_pending
from tests.support.builds import (
    SPILL,
    barriers_made,
    disassembled,
    loops_of,
    signature_of,
    single_arrivals,
)

SHARED_MEMORY = 227 * 1024


pytestmark = pytest.mark.usefixtures("compiled_once")


def build(heads, group, head_dim, dtype="bf16", debug=False, kv_dtype=None, **flags):
    constants = kernel_constants(
        heads, group, head_dim, narrow=kv_dtype is not None,
        **{"has_cap": False, "has_lse": False, "has_sink": False, "pdl": False, **flags},
    )  # fmt: skip
    return triton.compile(
        GluonASTSource(row_tile_kernel, *signature_of(constants, dtype, kv_dtype)),
        target=GPUTarget("cuda", 90, 32),
        options=compiler_options() | {"debug": debug},
    )


def loops(sass, instruction, times):
    """The loops that have the instruction so many times, the shortest first."""
    text, found = loops_of(sass)
    texts = [text[a:b] for a, b in found if text[a:b].count(instruction) >= times]
    return sorted(texts, key=len)


def spills(sass, instruction, times, count):
    """Spills in the shortest `count` loops that have the instruction so many times."""
    found = loops(sass, instruction, times)
    assert len(found) >= count
    return [len(SPILL.findall(loop)) for loop in found[:count]]


SHAPES = {
    "llama": ((8, 4, 128), {}),
    "qwen": ((4, 7, 128), {"dtype": "fp16", "has_lse": True, "has_cap": True}),
    "mha-64-pdl": ((16, 1, 64), {"pdl": True, "has_lse": True}),
    "one KV head": ((1, 16, 128), {"has_lse": True}),
    "gemma": ((8, 2, 256), {"has_cap": True}),
    "gpt-oss": ((8, 8, 64), {"has_sink": True}),
    "gpt-oss-pdl": ((1, 8, 64), {"has_sink": True, "has_lse": True, "pdl": True}),
    "sinks-128": ((8, 4, 128), {"has_sink": True}),
    "sinks-256": ((8, 2, 256), {"has_sink": True, "has_cap": True}),
    "invariant": ((8, 4, 128), {"invariant": True}),
    "invariant-7-pdl": ((4, 7, 128), {"invariant": True, "has_cap": True, "pdl": True}),
    "invariant-64-sinks": ((8, 8, 64), {"invariant": True, "has_sink": True, "has_lse": True}),
    "invariant-256": ((8, 2, 256), {"invariant": True}),
    "gemma-7-pdl": ((2, 7, 256), {"dtype": "fp16", "has_lse": True, "pdl": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_no_spills_and_hopper_instructions(shape, tmp_path):
    args, flags = SHAPES[shape]
    compiled = build(*args, **flags)
    assert compiled.metadata.shared <= SHARED_MEMORY
    sass, usage = disassembled(compiled, tmp_path)
    # both consumers: head_dim / 16 products for scores, and BLOCK / 16 for values, in the loop and,
    # where those of a block overlap with the next one's, behind it
    head_dim = args[2]
    wide = head_dim == 256
    assert len(re.findall(r"\bHGMMA", sass)) == 2 * (head_dim // 16 + (4 if wide else 2 * 4))
    assert "LDGSTS.E.BYPASS.128" in sass, "rows are not copied 16 bytes a thread"
    if wide:  # what an item begins and ends with is not all in registers
        assert int(re.search(r"STACK:(\d+) .*LOCAL:0 ", usage)[1]) <= 128, usage
        assert max(spills(sass, "HGMMA", 16 + 4, count=2)) <= 1
        copies = 2 * 16 + 1  # of a block: keys and values, and masks
        assert spills(sass, "LDGSTS", CONFIGS[256].lookahead * copies, count=1) == [0]
    elif flags.get("invariant"):  # ptxas may keep a word for later before the roles begin
        assert int(re.search(r"STACK:(\d+) .*LOCAL:0 ", usage)[1]) <= 8, usage
        own = [x for x in loops(sass, "HGMMA", 1) if "LDGSTS" not in x]  # of a role, not of all
        own += [x for x in loops(sass, "LDGSTS", 1) if "HGMMA" not in x]
        assert len(own) >= 6 and not any(SPILL.search(loop) for loop in own)
    elif shape == "qwen" and not triton.__version__.startswith("3.6."):
        # a word of an item, but none of a block: three of K and V of 64 rows, and keys
        assert len(SPILL.findall(sass)) <= 2
        assert spills(sass, "HGMMA", 1, count=2) == [0, 0]
        assert spills(sass, "LDGSTS", 3 * (2 * 8 + 1), count=2) == [0, 0]
    else:
        assert re.search(r"STACK:0 .*LOCAL:0 ", usage), usage
        assert not SPILL.search(sass), "registers are spilled"
    # the producer waits for the kernel before, and only then lets the next one start
    depends = re.findall(r"\b(ACQBULK|PREEXIT)\b", sass)
    assert depends == ["ACQBULK", "PREEXIT"] * flags.get("pdl", False)
    # the merge waits for the counter, once a warpgroup
    assert "CCTL.IVALL" in sass
    # stages there and free, keys by themselves, too, of head dim 256; a stage that is none, queries
    # there and free for each warpgroup, and one for what both have shown
    assert barriers_made(sass) == (4 if wide else 2) * CONFIGS[head_dim].stages + 6
    assert single_arrivals(compiled.asm["ptx"]) > 0


NARROW = {
    "llama": ((8, 4, 128), {}),
    "qwen-pdl": ((4, 7, 128), {"pdl": True}),
    "one KV head": ((1, 16, 128), {"has_lse": True}),
    "capped": ((8, 4, 128), {"has_cap": True, "pdl": True}),
    "mha-64-pdl": ((16, 1, 64), {"pdl": True, "has_lse": True}),
    "gpt-oss": ((8, 8, 64), {"has_sink": True, "pdl": True}),
    "invariant": ((8, 4, 128), {"invariant": True}),
    "gemma": ((8, 2, 256), {"has_cap": True}),
    "gemma-7-pdl": ((4, 7, 256), {"has_cap": True, "pdl": True}),
    "one KV head of 256": ((1, 16, 256), {"has_lse": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", NARROW)
def test_e4m3_without_spills_and_with_its_own_products(shape, tmp_path):
    args, flags = NARROW[shape]
    compiled = build(*args, kv_dtype="fp8e4nv", **flags)
    assert compiled.metadata.shared <= SHARED_MEMORY
    sass, usage = disassembled(compiled, tmp_path)
    wide = args[2] == 256
    if wide:  # what an item begins and ends with is not all in registers
        assert int(re.search(r"STACK:(\d+) .*LOCAL:0 ", usage)[1]) <= 192, usage
        assert max(spills(sass, "HGMMA", 4, count=2)) <= 2
        copies = 2 * 8 + 1  # of a block: keys and values, and masks
        blocks = NARROW_CONFIGS[256].lookahead  # of a turn of the loop; one word each at most
        assert spills(sass, "LDGSTS", blocks * copies, count=1)[0] <= blocks
        # Tensor cores read the queries' terms from shared memory.
        ptx = compiled.asm["ptx"]
        products = [at.start() for at in re.finditer(r"wgmma\.mma_async\S*e4m3", ptx)]
        for at in products[:: len(products) // 2]:  # a warpgroup's first
            behind = ptx[ptx.rindex("st.shared", 0, at) : at]
            assert re.search(r"fence\.proxy\.async.*bar\.sync", behind, re.S)
    else:
        assert re.search(r"STACK:0 .*LOCAL:0 ", usage)
        assert not SPILL.search(sass), "registers are spilled"
    # of both consumers: each of two terms takes head_dim / 32 products, and values BLOCK / 16, in
    # the loop and, below head dim 256, behind it
    assert len(re.findall(r"\bQGMMA", sass)) == 2 * 2 * args[2] // 32
    assert len(re.findall(r"\bHGMMA", sass)) == (2 if wide else 2 * 2) * 4
    assert "LDGSTS.E.BYPASS.128" in sass, "rows are not copied 16 bytes a thread"
    assert "F2FP.F16.E4M3.UNPACK_B" in sass
    # of the blocks that are pending the oldest, of the last ones all, of the second run each
    waits = re.findall(r"cp\.async\.wait_group\s+(\d+)", compiled.asm["ptx"])
    assert {*waits} == {str(most_pending(args[2])), "0"}
    # keys there and stages free; values there and free, and those that are none; the rest as above
    stages = NARROW_CONFIGS[args[2]].stages
    assert barriers_made(sass) == 4 * stages + 2 + 5
    assert single_arrivals(compiled.asm["ptx"]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_accumulators_shrink_in_place_by_the_factors_of_their_rows(head_dim):
    ptx = build(8, 2, head_dim).asm["ptx"]
    texts = re.findall(r"setp\.neu\.f32 shrinks.*?same:", ptx, re.S)
    accumulators = re.findall(rf"wgmma\.mma_async\S*m64n{head_dim}k16\S* {{([^}}]*)}}", ptx)
    assert len(texts) == 2  # of a warpgroup each
    for text in texts:
        asked = re.findall(r"setp\.neu\.(?:or\.)?f32 shrinks, (%\w+),", text)
        products = re.findall(r"mul\.f32 (%\w+), (%\w+), (%\w+);", text)
        assert [product[2] for product in products] == [asked[0], asked[0], *asked[1:] * 2] * (
            head_dim // 8
        )
        assert all(to == of for to, of, _ in products)
        assert ",".join(to for to, _, _ in products) in accumulators


@pytest.mark.slow
@pytest.mark.parametrize(
    "heads, group, head_dim, kv_dtype",
    [(8, 4, 128, None), (1, 16, 128, None), (8, 4, 64, None), (8, 4, 128, "fp8e4nv"),
     (8, 4, 64, "fp8e4nv")],
)  # fmt: skip
def test_the_producer_does_not_wait_for_slots_that_it_has_just_asked_for(
    heads, group, head_dim, kv_dtype, tmp_path
):
    sass, _ = disassembled(build(heads, group, head_dim, kv_dtype=kv_dtype), tmp_path)
    config = (NARROW_CONFIGS if kv_dtype else CONFIGS)[head_dim]
    # a thread's copies of each block: of keys and of values, and of masks
    copies = 2 * head_dim // (32 if kv_dtype else 16) + 1
    loop = loops(sass, "LDGSTS", config.lookahead * copies)[0]
    asked = re.findall(r"LDG\.E\.(64|128)(?:\.CONSTANT)? R(\d+)", loop)
    assert len(asked) == config.lookahead
    # a move would wait for the load
    moved = {int(r) for r in re.findall(r"\bMOV(?:\.U32)? R\d+, (?:RZ, RZ, )?R(\d+)", loop)}
    assert not moved & {int(r) + i for bits, r in asked for i in range(int(bits) // 32)}


def test_slots_asked_for_ahead_stay_in_a_plan():
    for config in (*CONFIGS.values(), *NARROW_CONFIGS.values()):
        assert W.PRE <= config.lookahead <= W.LOOKAHEAD


@pytest.mark.slow
@pytest.mark.parametrize("debug", [False, True])
def test_the_wait_for_other_ctas_ends_in_debug_builds(debug):
    ir = build(8, 4, 128, debug=debug).asm["ttgir"]
    assert ("a part of this tile was never counted" in ir) == debug


def test_unsupported_shapes_are_refused():
    flags = {"has_cap": False, "has_lse": False, "has_sink": False, "pdl": False}
    with pytest.raises(ValueError, match="head dim 96 is none of"):
        kernel_constants(8, 4, 96, **flags)
    with pytest.raises(ValueError, match="head dim 80 is none of"):
        kernel_constants(8, 2, 80, narrow=True, **flags)
    with pytest.raises(ValueError, match="65 query heads"):
        kernel_constants(8, 65, 128, **flags)
