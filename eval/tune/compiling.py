"""Compiles forward kernels for a GPU that need not be there, and reads the compiler's report."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from sgl_prefix_attn.plan.tiles import TileConfig
from sgl_prefix_attn.records import HeadConfig

_PARTIAL_TYPE = {"bf16": "fp16", "fp16": "fp16", "fp32": "fp32"}


@dataclass(frozen=True)
class Target:
    """What a tile is compiled for; dtype 'bf16', 'fp16' or 'fp32' of q, K, V and the output,
    lengths 'i64' (SGLang's) or 'i32' of seq_lens."""

    arch: int
    heads: HeadConfig
    dtype: str
    lengths: str = "i64"


@dataclass(frozen=True)
class Report:
    """What the compiler made of a tile.

    registers         per thread
    spilled           bytes of registers stored to local memory anywhere
    loop_spills       instructions of the KV loops that go to local memory, which every KV block
                      pays; the rest is paid once per work item
    smem              bytes of shared memory
    tiles_in_flight   K and V tiles that the software pipeline of one CTA has under way at once
    wgmma             whether Hopper's warp-group MMA is used
    """

    registers: int
    spilled: int
    loop_spills: int
    smem: int
    tiles_in_flight: int
    wgmma: bool


def compile_all(
    tiles: list[TileConfig], target: Target, jobs: int | None = None
) -> dict[TileConfig, Report | str]:
    """Report on every tile, or give the compiler's error; `jobs` processes (default: all CPUs)."""
    jobs = min(jobs or os.cpu_count() or 1, len(tiles))
    if not tiles:
        return {}
    # spawn: a child forked from a process with threads may hang
    with ProcessPoolExecutor(jobs, get_context("spawn"), _compiled_kernels) as pool:
        return dict(zip(tiles, pool.map(_try, tiles, [target] * len(tiles)), strict=True))


def _compiled_kernels() -> None:
    """Import real kernels: the interpreter's replace them and cannot be compiled."""
    os.environ.pop("TRITON_INTERPRET", None)


def _try(tile: TileConfig, target: Target) -> Report | str:
    try:
        return report(tile, target)
    except Exception as error:  # the compiler's refusal is a result
        lines = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {lines[-1]}"


def report(tile: TileConfig, target: Target) -> Report:
    """Compile one tile with the arguments that TritonBackend gives it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sgl_prefix_attn.execute.backends.triton_backend import compiler_options, forward_constants
    from sgl_prefix_attn.kernels.triton.shared import shared_kernel
    from sgl_prefix_attn.kernels.triton.tails import tails_kernel

    kernel = tails_kernel if tile.requests else shared_kernel
    heads = target.heads
    constants = {
        **forward_constants(heads, tile, 0),
        "HAS_SOFT_CAP": False,
        "HAS_LSE": False,
    }
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else _type(n, target) for n in names}
    aligned = [
        n for n in names if n.startswith("stride") or (n.endswith("_ptr") and n != "ticket_ptr")
    ]
    compiled = triton.compile(
        ASTSource(
            kernel,
            signature,
            constexprs={(names.index(n),): v for n, v in constants.items() if n in names},
            attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
        ),
        target=GPUTarget("cuda", target.arch, 32),
        options=compiler_options(tile),
    )
    registers, spilled, sass = _assemble(compiled.asm["ptx"], Path(triton.__file__).parent)
    wgmma = "wgmma.mma_async" in compiled.asm["ptx"]
    return Report(
        registers=registers,
        spilled=spilled,
        loop_spills=loop_spills(sass),
        smem=compiled.metadata.shared,
        tiles_in_flight=_tiles_in_flight(compiled.asm["ttgir"], wgmma),
        wgmma=wgmma,
    )


def _type(name: str, target: Target) -> str:
    pointers = {
        "plan_ptr": "i32",
        "kv_indices_ptr": "i32",
        "ticket_ptr": "i32",
        "seq_lens_ptr": target.lengths,
        "partial_out_ptr": _PARTIAL_TYPE[target.dtype],
        "partial_state_ptr": "fp32",
    }
    if name.endswith("_ptr"):
        return "*" + pointers.get(name, target.dtype)
    return "i32" if name.startswith("stride") else "fp32"


def _assemble(ptx: str, triton_home: Path) -> tuple[int, int, str]:
    """Return registers per thread, bytes of spill stores and machine code, from Triton's tools."""
    arch = re.search(r"\.target (sm_\w+)", ptx)[1]
    tools = triton_home / "backends/nvidia/bin"
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        log = _output(tools / "ptxas", "-v", f"-arch={arch}", source, "-o", binary)
        sass = _output(tools / "cuobjdump", "-sass", binary)
    registers = int(re.search(r"Used (\d+) registers", log)[1])
    return registers, int(re.search(r"(\d+) bytes spill stores", log)[1]), sass


def _output(*command) -> str:
    return subprocess.run(
        command, text=True, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ).stdout


def loop_spills(sass: str) -> int:
    """Count loads and stores of local memory in the innermost loops of a disassembly. A branch to
    itself, behind the end of every kernel, is no loop."""
    code = [
        (int(address, 16), text)
        for address, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", sass)
    ]
    back = [(address, re.search(r"\bBRA\b.*?\b(0x[0-9a-f]+)", text)) for address, text in code]
    loops = [(int(m[1], 16), end) for end, m in back if m and int(m[1], 16) < end]
    innermost = [
        (start, end)
        for start, end in loops
        if not any(start <= s and e <= end and (s, e) != (start, end) for s, e in loops)
    ]
    return sum(
        bool(re.search(r"\b(LDL|STL)\b", text)) and any(s <= at <= e for s, e in innermost)
        for at, text in code
    )


def _tiles_in_flight(ttgir: str, wgmma: bool) -> int:
    """Count the buffers that the pipeline keeps for K and V: [buffers, rows, columns] of the
    model's dtype. wgmma reads its tile from one of them; other MMAs copy it to registers first.
    Without a pipeline one tile at a time is loaded."""
    buffers = re.findall(
        r"local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x(?:bf16|f16|f32)", ttgir
    )
    return max(1, sum(int(n) - wgmma for n in buffers))
