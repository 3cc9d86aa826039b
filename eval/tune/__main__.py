"""python -m eval.tune solve: feasible tiles of a GPU, and what excludes every other one.

Compiles the forward kernels of every (BLOCK_M, BLOCK_N, warps, stages) with Triton for the GPU
named, which need not be there, and applies PAT §5.2's constraints to the compiler's report. What is
feasible is then measured (eval.bench_kernel); the defaults are in sgl_prefix_attn/tuning.py.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from eval import provenance
from eval.tune.constraints import DTYPE_BYTES, Verdict
from eval.tune.gpus import GPUS
from eval.tune.solve import Solution, kernel_name, solve
from sgl_prefix_attn.plan.tiles import TileConfig
from sgl_prefix_attn.records import HeadConfig

_LOG_WIDTH = 130
_TILE_COLUMNS = ("kernel", "m", "n", "warps", "stages", "cap")


def main(argv: list[str]) -> int:
    args = _parse(argv)
    gpu = GPUS[args.gpu]
    heads = HeadConfig(args.group * args.kv_heads, args.kv_heads, args.head_dim)
    solution = solve(gpu, heads, args.dtype, jobs=args.jobs)
    console = Console(width=None if sys.stdout.isatty() else _LOG_WIDTH)
    console.print(_heading(solution))
    console.print(_feasible_table(solution))
    console.print(_excluded_table(solution))
    print(_counts(solution))
    if args.json:
        meta = provenance.collect("eval.tune", argv, gpu_limits=asdict(gpu), heads=asdict(heads))
        provenance.save(args.json, meta, [_row(v, solution) for v in solution.verdicts])
    return 0 if all(v.feasible for v in solution.verdicts if v.tile in solution.defaults) else 1


def _heading(solution: Solution) -> str:
    gpu, heads = solution.gpu, solution.heads
    return (
        f"{gpu.name} (sm_{gpu.arch}), head dim {heads.head_dim}, {heads.group_size} query heads a "
        f"KV head, {solution.dtype}: {gpu.bytes_in_flight / 1e3:.0f} kB must be in flight "
        f"({gpu.latency_ns:.0f} ns x {gpu.bandwidth:.0f} B/ns)"
    )


def _feasible_table(solution: Solution) -> Table:
    table = Table(title="feasible")
    for name in (*_TILE_COLUMNS, "registers", "spill B", "smem B", "CTAs/SM"):
        table.add_column(name, justify="left" if name == "kernel" else "right")
    table.add_column("kB in flight", justify="right")
    table.add_column("MMA")
    table.add_column("default")
    for v in solution.verdicts:
        if v.feasible:
            table.add_row(
                *_tile_cells(v.tile),
                *map(str, (v.report.registers, v.report.spilled, v.report.smem, v.ctas_per_sm)),
                f"{v.in_flight / 1e3:.0f}",
                "wgmma" if v.report.wgmma else "mma",
                "*" if v.tile in solution.defaults else "",
            )
    return table


def _excluded_table(solution: Solution) -> Table:
    table = Table(title="excluded")
    for name in _TILE_COLUMNS:
        table.add_column(name, justify="left" if name == "kernel" else "right")
    table.add_column("by constraint", overflow="fold")
    for v in solution.verdicts:
        if not v.feasible:
            mark = "a default! " if v.tile in solution.defaults else ""
            why = "; ".join(f"{name}: {why}" for name, why in v.violations)
            table.add_row(*_tile_cells(v.tile), mark + why)
    return table


def _tile_cells(tile: TileConfig) -> list[str]:
    """cap: registers that the compiler may give a thread, where it is told."""
    sizes = (tile.block_m, tile.block_n, tile.num_warps, tile.num_stages, tile.max_regs or "")
    return [kernel_name(tile), *map(str, sizes)]


def _counts(solution: Solution) -> str:
    """Totals, and the defaults that are not feasible: the last lines, for a log's end."""
    feasible = sum(v.feasible for v in solution.verdicts)
    lines = [f"{feasible} of {len(solution.verdicts)} configurations are feasible"]
    for v in solution.verdicts:
        if v.tile in solution.defaults and not v.feasible:
            tile = v.tile
            lines.append(
                f"NOT FEASIBLE but a default: {kernel_name(tile)} {tile.block_m}x{tile.block_n}, "
                f"{tile.num_warps} warps, {tile.num_stages} stages: {v.violations[0][1]}"
            )
    return "\n".join(lines)


def _row(verdict: Verdict, solution: Solution) -> dict:
    tile = verdict.tile
    return {
        "kernel": kernel_name(tile),
        "block_m": tile.block_m,
        "block_n": tile.block_n,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "max_regs": tile.max_regs,
        "feasible": verdict.feasible,
        "default": tile in solution.defaults,
        "violations": [{"constraint": name, "why": why} for name, why in verdict.violations],
        "ctas_per_sm": verdict.ctas_per_sm,
        "bytes_in_flight": verdict.in_flight,
        "report": asdict(verdict.report) if verdict.report else None,
    }


def _parse(argv: list[str]):
    parser = argparse.ArgumentParser(prog="python -m eval.tune", description=__doc__)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("solve", help="feasible tile configurations of a GPU")
    one.add_argument("--gpu", default="H100", choices=list(GPUS))
    one.add_argument("--arch", type=int, help="compute capability x 10; selects the GPU by it")
    one.add_argument("--head-dim", type=int, default=128)
    one.add_argument("--group", type=int, default=4, help="query heads a KV head")
    one.add_argument("--kv-heads", type=int, default=8)
    one.add_argument("--dtype", default="bf16", choices=list(DTYPE_BYTES))
    one.add_argument("--jobs", type=int, help="compiler processes; default: all CPUs")
    one.add_argument("--json", metavar="OUT")
    args = parser.parse_args(argv)
    if args.arch is not None and args.arch != GPUS[args.gpu].arch:
        matching = [name for name, gpu in GPUS.items() if gpu.arch == args.arch]
        if not matching:
            parser.error(f"arch {args.arch}: known are {sorted({g.arch for g in GPUS.values()})}")
        args.gpu = matching[0]
    return args


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
