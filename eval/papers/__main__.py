"""python -m eval.papers EXPERIMENT...: the papers' experiments at our scale, ours beside theirs.

Batches of `kernels` are run by what a server with the plugin runs on such a GPU, by FlashInfer and
by FlashAttention 3, judged against fp64 and timed in turn (CUDA-graph replay over several KV pools,
cold L2, medians). What another benchmark measures is taken from its result file, --from. --expect
writes what is expected of an H200, without a GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from eval import provenance
from eval.bench_kernel.case import DTYPES
from eval.bench_kernel.floor import rates_of
from eval.cli_values import amount, output
from eval.papers import measure, paper_tables
from eval.papers.counts import H200
from eval.papers.experiment import HEADS_IN_ORDER, NOT_MEASURED, Experiment
from eval.papers.experiments import EXPERIMENTS, GROUPS, find

_MODULE = "eval.papers"


def main(argv: list[str]) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        experiments = find(args.names)
        _check(args, experiments)
        if args.source:
            rows, meta = _derived(experiments[0], args.source, argv)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if args.expect:
        rows = [row for e in experiments for row in _expected(e)]
        meta = provenance.collect(_MODULE, argv, rates=asdict(H200))
    elif not args.source:
        rows, meta = _measured(experiments, args, argv)
    if args.json:
        provenance.save(args.json, meta, rows, figures=paper_tables.figures(rows))
    print(paper_tables.markdown(rows))
    if left_out := meta.get("left_out"):
        print(f"\nnot started within {args.seconds:g} s: {', '.join(left_out)}")
    ours = [row for row in rows if row.get("provider") == "prefix"]
    return int(any(row["status"].startswith(("wrong", "failed", "unav")) for row in ours))


def _expected(experiment: Experiment) -> list[dict]:
    if experiment.count:
        rows = experiment.count()
    else:
        # One that has no runs is a line of the table all the same.
        rows = [row for run in experiment.runs for row in measure.expect(run, H200)]
        rows = rows or [{"status": NOT_MEASURED}]
    return [{"experiment": experiment.name, **row} for row in rows]


def _derived(experiment: Experiment, source: Path, argv: list[str]) -> tuple[list[dict], dict]:
    """Make rows from another benchmark's file, with its provenance."""
    result = provenance.load(source)
    try:
        rows = experiment.derive(result["rows"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{source} is no result of {experiment.source}: {error!r}") from None
    if not rows:
        raise ValueError(f"{source} has no rows that {experiment.name} asks for")
    command = provenance.collect(_MODULE, argv)["command"]
    meta = result["meta"] | {"command": f"{result['meta']['command']} && {command}"}
    return [{"experiment": experiment.name, **row} for row in rows], meta


def _measured(experiments: list[Experiment], args, argv) -> tuple[list[dict], dict]:
    """Run experiments; configurations of heads in turn, as far as the time goes."""
    runs = [(e.name, run) for e in experiments for run in e.runs]
    device = torch.device("cuda" if runs else "cpu")
    rates = rates_of(device)
    meta = provenance.collect(_MODULE, argv, device=str(device), rates=asdict(rates))
    counted = [row for e in experiments if e.count for row in _expected(e)]
    found: list[list[dict]] = [[] for _ in runs]
    start, left_out = time.monotonic(), []
    for i in sorted(range(len(runs)), key=lambda i: HEADS_IN_ORDER.index(runs[i][1].heads)):
        name, run = runs[i]
        if args.seconds and time.monotonic() - start > args.seconds:
            left_out.append(f"{name} {run.batch.name}")
            continue
        rows = measure.measure(run, rates, DTYPES["bf16"], device)
        measure.free(device)
        found[i] = [{"experiment": name, **row} for row in rows]
        print(_line(found[i], time.monotonic() - start), flush=True)
        if args.json:
            provenance.save(args.json, meta, [row for rows in found for row in rows])
    return [*(row for rows in found for row in rows), *counted], meta | {"left_out": left_out}


def _line(rows: list[dict], seconds: float) -> str:
    times = "  ".join(
        f"{row['provider']} {row['us']:.1f} ({row['expected_us']:.0f})"
        if "us" in row
        else f"{row['provider']} {row['status']}"
        for row in rows
    )
    first = rows[0]
    return f"{seconds:5.1f} s  {first['experiment']}  {first['heads']:5} {first['batch']}: {times}"


def _check(args, experiments: list[Experiment]) -> None:
    """Raise ValueError for experiments that cannot be had as they were asked for."""
    others = [e for e in experiments if e.derive]
    if args.source and (args.expect or len(experiments) > 1 or not others):
        raise ValueError("--from goes with one experiment that another benchmark measures")
    if args.source or args.expect:
        return
    if others:
        raise ValueError(f"{others[0].name}: needs --from, a result file of {others[0].source}")
    if any(e.runs for e in experiments) and not torch.cuda.is_available():
        raise ValueError("kernels are timed on an NVIDIA GPU; --expect needs none")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {_MODULE}", description=__doc__)
    known = ", ".join([*GROUPS, *EXPERIMENTS])
    parser.add_argument("names", nargs="+", metavar="EXPERIMENT", help=known)
    parser.add_argument("--from", dest="source", type=Path, metavar="RESULT", help="file to use")
    parser.add_argument("--expect", action="store_true", help="run nothing")
    parser.add_argument("--seconds", type=amount, help="start no batch later (listed: left_out)")
    parser.add_argument(
        "--json", type=output, metavar="OUT", help="result file, written after every batch"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
