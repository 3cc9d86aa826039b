"""python -m eval.papers EXPERIMENT...: the papers' experiments at our scale, ours beside theirs.

Batches of `kernels` are run by what a server with the plugin runs on such a GPU, by FlashInfer and
by FlashAttention 3, judged against fp64 and timed in turn (CUDA-graph replay over several KV pools,
cold L2, medians). What another benchmark measures is taken from its result file, --from.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from eval import provenance
from eval.bench_kernel.case import DTYPE
from eval.bench_kernel.floor import rates_of
from eval.cli_values import output
from eval.papers import measure, paper_tables
from eval.papers.experiment import Experiment
from eval.papers.experiments import EXPERIMENTS, KERNELS, find

_MODULE = "eval.papers"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {_MODULE}", description=__doc__)
    known = [KERNELS, *EXPERIMENTS]
    parser.add_argument(
        "names", nargs="+", metavar="EXPERIMENT", choices=known, help=", ".join(known)
    )
    parser.add_argument("--from", dest="source", type=Path, metavar="RESULT", help="file to use")
    parser.add_argument("--json", type=output, metavar="OUT", help="result file")
    args = parser.parse_args(argv)
    experiments = find(args.names)
    try:
        others = [e for e in experiments if e.derive]
        if args.source and (len(experiments) > 1 or not others):
            raise ValueError("--from goes with one experiment that another benchmark measures")
        if others and not args.source:
            raise ValueError(f"{others[0].name}: needs --from, a result file of {others[0].source}")
        if any(e.runs for e in experiments) and not torch.cuda.is_available():
            raise ValueError("kernels are timed on an NVIDIA GPU")
        if args.source:
            rows, meta = _derived(experiments[0], args.source, argv)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if not args.source:
        rows, meta = _measured(experiments, args, argv)
    if args.json:
        provenance.save(args.json, meta, rows, figures=paper_tables.figures(rows))
    print(paper_tables.markdown(rows))
    ours = [row for row in rows if row.get("provider") == "prefix"]
    return int(any(row["status"].startswith(("wrong", "failed", "unav")) for row in ours))


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
    """Run experiments, and count what needs no run."""
    device = torch.device("cuda" if any(e.runs for e in experiments) else "cpu")
    rates = rates_of(device)
    meta = provenance.collect(_MODULE, argv, device=str(device), rates=asdict(rates))
    rows: list[dict] = []
    for e in experiments:
        for run in e.runs:
            found = measure.measure(run, rates, DTYPE, device)
            rows += [{"experiment": e.name, **row} for row in found]
            times = (
                f"{row['provider']} " + (f"{row['us']:.1f}" if "us" in row else row["status"])
                for row in found
            )
            heads, batch = found[0]["heads"], found[0]["batch"]
            print(f"{e.name}  {heads:5} {batch}: {'  '.join(times)}", flush=True)
            provenance.save(args.json, meta, rows)
    counted = [{"experiment": e.name, **row} for e in experiments if e.count for row in e.count()]
    return rows + counted, meta


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
