"""The row-tile kernel, compiled for Hopper without a GPU: what ptxas made of it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from sgl_prefix_attn.kernels.gluon.attention import row_tile_kernel
from sgl_prefix_attn.kernels.gluon.build_options import (
    compiler_options,
    kernel_constants,
)

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
SHARED_MEMORY = 227 * 1024

POINTERS = {
    "q": "", "k": "", "v": "", "out": "", "lse": "fp32", "partial_out": "fp16",
    "partial_state": "fp32", "counters": "i32", "words": "i32", "slots": "i32", "keys": "i32",
}  # fmt: skip
STRIDES = ("stride_q", "stride_k", "stride_v", "stride_out")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def build(heads, group, head_dim, dtype="bf16", debug=False, **flags):
    constants = kernel_constants(
        heads, group, head_dim,
        **{"has_cap": False, "has_lse": False, "pdl": False, **flags},
    )  # fmt: skip
    signature = {f"{name}_ptr": f"*{kind or dtype}" for name, kind in POINTERS.items()}
    signature |= dict.fromkeys(STRIDES, "i32")
    signature |= {"sm_scale": "fp32", "logits_soft_cap": "fp32"}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(POINTERS) + len(STRIDES))}
    signature |= dict.fromkeys(constants, "constexpr")
    return triton.compile(
        GluonASTSource(row_tile_kernel, signature, constants, aligned),
        target=GPUTarget("cuda", 90, 32),
        options=compiler_options() | {"debug": debug},
    )


def tool(name, *args):
    return subprocess.run([TOOLS / name, *args], capture_output=True, text=True, check=True).stdout


SPILL = re.compile(r"\b(?:STL|LDL)\b")


def loops(sass, instruction, times):
    """The loops that have the instruction so many times, the shortest first."""
    parts = re.split(r"^(\.L_x_\d+):", sass, flags=re.M)
    start, found, end = {}, [], 0
    for part in parts:
        if part.startswith(".L_x_"):
            start[part] = end
        for jump in re.finditer(r"BRA.*`\((\.L_x_\d+)\)", part):
            if jump[1] in start:
                found.append((start[jump[1]], end + jump.end()))
        end += len(part)
    text = "".join(parts)
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
    "partial results left": ((8, 4, 128), {"fused_merge": False}),
    "gemma": ((8, 2, 256), {"has_cap": True}),
    "gemma-7-pdl": ((2, 7, 256), {"dtype": "fp16", "has_lse": True, "pdl": True}),
    "dynamic queue": ((8, 4, 128), {"fused_merge": False, "dynamic": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_no_spills_and_hopper_instructions(shape, tmp_path):
    args, flags = SHAPES[shape]
    compiled = build(*args, **flags)
    assert compiled.metadata.shared <= SHARED_MEMORY
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    usage = tool("cuobjdump", "-res-usage", cubin)
    sass = tool("nvdisasm", "-c", cubin)
    # both consumers: head_dim / 16 products for scores, and BLOCK / 16 for values, in the loop and,
    # where those of a block overlap with the next one's, behind it
    head_dim = args[2]
    wide = head_dim == 256
    assert len(re.findall(r"\bHGMMA", sass)) == 2 * (head_dim // 16 + (4 if wide else 2 * 4))
    assert "LDGSTS.E.BYPASS.128" in sass, "rows are not copied 16 bytes a thread"
    if wide:  # what an item begins and ends with is not all in registers
        assert int(re.search(r"STACK:(\d+) .*LOCAL:0 ", usage)[1]) <= 128, usage
        assert max(spills(sass, "HGMMA", 16 + 4, count=2)) <= 1
        # K and V of 64 rows, and keys; none by Triton 3.6, some by 3.8
        assert max(spills(sass, "LDGSTS", 2 * 16 + 1, count=1)) <= 6
    elif flags.get("dynamic"):  # an ablation's: its producer holds a queue's ticket, too
        assert re.search(r"STACK:8 .*LOCAL:0 ", usage), usage
        assert max(spills(sass, "HGMMA", 8 + 4, count=2)) == 0
    else:
        assert re.search(r"STACK:0 .*LOCAL:0 ", usage), usage
        assert not SPILL.search(sass), "registers are spilled"
    # the producer waits for the kernel before, and only then lets the next one start
    depends = re.findall(r"\b(ACQBULK|PREEXIT)\b", sass)
    assert depends == ["ACQBULK", "PREEXIT"] * flags.get("pdl", False)
    # the merge waits for the counter, once a warpgroup
    assert ("CCTL.IVALL" in sass) == flags.get("fused_merge", True)


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
@pytest.mark.parametrize("heads, group", [(8, 4), (1, 16)])
def test_the_producer_does_not_wait_for_slots_that_it_has_just_asked_for(heads, group, tmp_path):
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(build(heads, group, 128).asm["cubin"])
    # three blocks of keys, values (8 copies each) and masks
    loop = loops(tool("nvdisasm", "-c", cubin), "LDGSTS", 3 * 17)[0]
    asked = [int(r) for r in re.findall(r"LDG\.E\.128(?:\.CONSTANT)? R(\d+)", loop)]
    assert len(asked) == 3
    # a move would wait for the load
    moved = {int(r) for r in re.findall(r"\bMOV(?:\.U32)? R\d+, (?:RZ, RZ, )?R(\d+)", loop)}
    assert not moved & {r + i for r in asked for i in range(4)}


@pytest.mark.slow
@pytest.mark.parametrize("debug", [False, True])
def test_the_wait_for_other_ctas_ends_in_debug_builds(debug):
    ir = build(8, 4, 128, debug=debug).asm["ttgir"]
    assert ("a part of this tile was never counted" in ir) == debug


def test_unsupported_shapes_are_refused():
    flags = {"has_cap": False, "has_lse": False, "pdl": False}
    with pytest.raises(ValueError, match="head dim 96 is none of"):
        kernel_constants(8, 4, 96, **flags)
    with pytest.raises(ValueError, match="65 query heads"):
        kernel_constants(8, 65, 128, **flags)
