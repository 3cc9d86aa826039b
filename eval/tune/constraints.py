"""PAT §5.2's constraints on a tile, in the paper's numbering, each with by how much it is missed.

    1 shared memory and registers   upper bounds on m and n, from the compiler's own report
    2 bytes in flight               lower bound on n: n >= L * B / (S * C * t * h * b)
    3 MMA                           lower bounds on m and n, powers of two

t, the tiles that one CTA loads at once, is 1 in the paper; a deeper pipeline has more under way.
Spills exclude a tile where its KV loop pays for them; those around the loop cost each work item
some cycles once, and a cap on registers may be worth them: they are shown, and measuring decides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from eval.tune.compiling import Report
from eval.tune.gpus import GpuLimits
from sgl_prefix_attn.plan.tiles import TileConfig
from sgl_prefix_attn.records import HeadConfig

MMA_MINIMUM = 16
DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class Verdict:
    """violations: (constraint, by how much); ctas and in_flight are 0 where nothing compiled."""

    tile: TileConfig
    report: Report | None
    violations: list[tuple[str, str]] = field(default_factory=list)
    ctas_per_sm: int = 0
    in_flight: int = 0  # bytes, whole GPU

    @property
    def feasible(self) -> bool:
        return not self.violations


def before_compiling(tile: TileConfig, heads: HeadConfig, gpu: GpuLimits) -> list[tuple[str, str]]:
    """List what rules a tile out whatever the compiler does."""
    found = []
    for name, size in (("m", tile.block_m), ("n", tile.block_n)):
        if size < MMA_MINIMUM or size & (size - 1):
            found.append(("3 MMA", f"{name}={size}, needs a power of two >= {MMA_MINIMUM}"))
    rows = heads.group_size * max(tile.requests, 1)
    if tile.block_m < rows:
        found.append(("3 MMA", f"m={tile.block_m} holds no {rows} rows (queries x GQA group)"))
    if tile.requests > tile.block_n:
        found.append(("3 MMA", f"n={tile.block_n} holds no token of {tile.requests} requests"))
    accumulator = tile.block_m * _padded(heads.head_dim) / (32 * tile.num_warps)
    if accumulator > gpu.registers_per_thread:
        found.append(
            (
                "1 registers",
                f"accumulator alone {accumulator:.0f} per thread, limit {gpu.registers_per_thread}",
            )
        )
    return found


def judge(
    tile: TileConfig, report: Report | str, heads: HeadConfig, gpu: GpuLimits, dtype: str
) -> Verdict:
    """Judge a compiled tile."""
    if isinstance(report, str):
        return Verdict(tile, None, [("compiler", report)])
    found = []
    if report.smem > gpu.smem_per_cta:
        over = report.smem - gpu.smem_per_cta
        found.append(
            ("1 shared memory", f"{report.smem} B, {over} B over a CTA's {gpu.smem_per_cta}")
        )
    if report.loop_spills:
        found.append(
            (
                "1 registers",
                f"{report.registers} per thread (limit "
                f"{tile.max_regs or gpu.registers_per_thread}) and {report.spilled} B spilled, "
                f"{report.loop_spills} times in the KV loop",
            )
        )
    ctas = gpu.resident_ctas(report.registers, tile.num_warps, report.smem)
    if ctas == 0 and not found:
        need = gpu.registers_of(report.registers, tile.num_warps)
        found.append(("1 registers", f"{need} per CTA, {gpu.registers} per SM"))
    tile_bytes = tile.block_n * heads.head_dim * DTYPE_BYTES[dtype]
    in_flight = gpu.num_sms * ctas * report.tiles_in_flight * tile_bytes
    if ctas and in_flight < gpu.bytes_in_flight:
        least = math.ceil(tile.block_n * gpu.bytes_in_flight / in_flight)
        found.append(
            (
                "2 bytes in flight",
                f"n={tile.block_n}, needs n >= {least} at {ctas} CTAs per SM and "
                f"{report.tiles_in_flight} tiles each",
            )
        )
    return Verdict(tile, report, found, ctas, in_flight)


def _padded(head_dim: int) -> int:
    return max(MMA_MINIMUM, 1 << (head_dim - 1).bit_length())
