"""python -m eval.tune solve: feasible tiles of a GPU, and what excludes every other one.

Compiles the forward kernels of every (BLOCK_M, BLOCK_N, warps, stages) with Triton for the GPU
named, which need not be there, and applies PAT §5.2's constraints to the compiler's report. What is
feasible is then measured (eval.bench_kernel); the defaults are in plan/tile_defaults.py.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from eval import provenance
from eval.cli_values import output
from eval.tune.constraints import DTYPE_BYTES, Verdict
from eval.tune.gpus import GPUS
from eval.tune.solve import Solution, kernel_name, solve
from sgl_prefix_attn.cli.argument_types import count
from sgl_prefix_attn.execute.backends.triton_backend import TritonBackend
from sgl_prefix_attn.records import HeadConfig

_LOG_WIDTH = 150


def main(argv: list[str]) -> int:
    """Return 1 when a default is not feasible."""
    args, heads = _parse(argv)
    gpu = GPUS[args.gpu]
    solution = solve(gpu, heads, args.dtype, jobs=args.jobs)
    rows = [_row(verdict, solution) for verdict in solution.verdicts]
    print(
        f"{gpu.name} (sm_{gpu.arch}), head dim {heads.head_dim}, {heads.group_size} query heads "
        f"per KV head, {args.dtype}: {gpu.bytes_in_flight / 1e3:.0f} kB must be in flight "
        f"({gpu.latency_ns:.0f} ns x {gpu.bandwidth:.0f} B/ns)"
    )
    Console(width=None if sys.stdout.isatty() else _LOG_WIDTH).print(_table(rows))
    print(f"{sum(row['feasible'] for row in rows)} of {len(rows)} configurations are feasible")
    wrong = [row for row in rows if row["default"] and not row["feasible"]]
    for row in wrong:
        print(f"NOT FEASIBLE but a default: {' '.join(_cells(row))}")
    if args.json:
        meta = provenance.collect("eval.tune", argv, gpu_limits=asdict(gpu), heads=asdict(heads))
        provenance.save(args.json, meta, rows)
    return 1 if wrong else 0


def _row(verdict: Verdict, solution: Solution) -> dict:
    tile, report = verdict.tile, verdict.report
    return {
        "kernel": kernel_name(tile),
        "m": tile.block_m,
        "n": tile.block_n,
        "warps": tile.num_warps,
        "stages": tile.num_stages,
        "max_regs": tile.max_regs or None,
        "registers": report and report.registers,
        "spill_bytes": report and report.spilled,
        "smem_bytes": report and report.smem,
        "ctas_per_sm": verdict.ctas_per_sm,
        "bytes_in_flight": verdict.in_flight,
        "wgmma": report and report.wgmma,
        "default": tile in solution.defaults,
        "feasible": verdict.feasible,
        "excluded_by": "; ".join(f"{name}: {why}" for name, why in verdict.violations),
    }


def _table(rows: list[dict]) -> Table:
    """Tabulate feasible tiles first."""
    table = Table(*(name.replace("_", " ") for name in rows[0]), box=box.SIMPLE, padding=0)
    for row in sorted(rows, key=lambda row: not row["feasible"]):
        table.add_row(*_cells(row))
    return table


def _cells(row: dict) -> list[str]:
    return ["" if value is None or value is False else str(value) for value in row.values()]


def _parse(argv: list[str]):
    parser = argparse.ArgumentParser(prog="python -m eval.tune", description=__doc__)
    parser.add_argument("what", choices=["solve"], help="feasible tile configurations of a GPU")
    parser.add_argument("--gpu", default="H100", choices=list(GPUS))
    parser.add_argument("--head-dim", type=count, default=128)
    parser.add_argument("--group", type=count, default=4, help="query heads per KV head")
    parser.add_argument("--kv-heads", type=count, default=8)
    parser.add_argument("--dtype", default="bf16", choices=list(DTYPE_BYTES))
    parser.add_argument("--jobs", type=count, help="compiler processes; default: all CPUs")
    parser.add_argument("--json", type=output, metavar="OUT")
    args = parser.parse_args(argv)
    heads = HeadConfig(args.group * args.kv_heads, args.kv_heads, args.head_dim)
    kernels = TritonBackend.capabilities
    if kernels.why_not(heads, torch.bfloat16) is not None:
        parser.error(f"--head-dim, --group: the kernels take {kernels.describe()}")
    return args, heads


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
