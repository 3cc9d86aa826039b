"""python -m eval.bench_serving: SGLang's own benchmark client, one real server per backend in turn.

Servers have random weights and run one after another on one GPU; each serves all loads, every one
from an empty radix cache. The first backend is what the others are compared with, and a rate in per
cent is of the requests/s that it serves when all come at once. A report: nothing is asserted.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from itertools import product
from pathlib import Path

from eval import provenance
from eval.bench_serving import rate_plot, rates, resume
from eval.bench_serving.client import Client, lacks_datasets
from eval.bench_serving.runs import Run, measure
from eval.cli_values import amount, device, output, several
from eval.dummy_engine import in_turn
from eval.engine_process import end_on_sigterm
from eval.model_shapes import SHAPES
from eval.server_process import ServerError, backend_server
from eval.word_tokenizer import write_word_model
from eval.workloads import catalogue
from eval.workloads.load import Load, Scale
from sgl_prefix_attn.cli.argument_types import count

_CPU_ARGUMENTS = ("--max-total-tokens", "32768")


def main(argv: list[str]) -> int:
    args, loads = _parse(argv)
    end_on_sigterm()
    meta = provenance.collect(
        "eval.bench_serving",
        argv,
        settings=_settings(args),
        loads={load.name: load.facts() for load in loads},
    )
    runs = [
        Run(backend, alternation, load, rate)
        for alternation, backend in in_turn(args.backends, args.alternations)
        for load, rate in product(loads, args.rates)
    ]
    rows = _earlier(args, meta, runs)
    have = {resume.key(row) for row in rows}
    runs = [run for run in runs if run.key not in have]
    _tell(f"{len(runs)} runs" + (f", {len(rows)} kept from {args.json}" if rows else ""))
    if lacks_datasets():
        _tell("the package `datasets` is missing: SGLang's client gets a stand-in, MMMU is unused")
    with tempfile.TemporaryDirectory(prefix="bench-serving-") as folder:
        _run_all(args, runs, rows, meta, Path(folder))
    if args.plot and rows:
        rate_plot.write(rows, args.plot)
    have = {resume.key(row) for row in rows}
    missing = [run for run in runs if run.key not in have]
    if missing:
        print(f"{len(missing)} of {len(runs)} runs failed or were left out", file=sys.stderr)
    return int(bool(missing))


def _run_all(args, runs: list[Run], rows: list[dict], meta: dict, folder: Path) -> None:
    """Add and save rows as they come; what fails is told."""
    model = write_word_model(folder / "model", args.model_shape)
    words = SHAPES[args.model_shape]["vocab_size"]
    with Client(model, words, folder / "runs", args.seed) as client:
        for turn in dict.fromkeys((run.alternation, run.backend) for run in runs):
            own = [run for run in runs if (run.alternation, run.backend) == turn]
            try:
                for row in _serve(args, own, rows, client, folder / f"servers-{turn[0]}"):
                    rows.append(row)
                    if args.json:
                        provenance.save(args.json, meta, rows)
            except ServerError as error:
                print(f"{turn[1]} stopped: {error}\n{error.log_tail}", file=sys.stderr, flush=True)


def _serve(args, runs: list[Run], rows: list[dict], client: Client, folder: Path):
    """Yield rows of runs of one backend on a server of its own. Raises ServerError."""
    backend, on_cpu = runs[0].backend, args.device.type == "cpu"
    arguments = [
        *("--load-format", "dummy", "--random-seed", "1", "--enable-metrics"),
        *("--max-running-requests", str(args.max_running)),
        *(_CPU_ARGUMENTS if on_cpu else ()),
        *args.server_arguments,
    ]
    server = backend_server(
        backend,
        client.model,
        folder,
        arguments=arguments,
        on_cpu=on_cpu,
        port=args.port,
        start_limit_s=args.start_timeout,
        progress=_tell,
    )
    _tell(f"starting {backend}")
    with server:
        start_s = server.wait_until_healthy()
        _tell(f"{backend} is up after {start_s:.0f} s")

        def saturation(load: Load) -> float | None:
            return resume.saturation(rows, load.name, args.backends[0])

        for row in measure(runs, server, client, saturation, _tell):
            yield row | {"start_s": round(start_s, 1)}


def _earlier(args, meta: dict, runs: list[Run]) -> list[dict]:
    """Return rows of the result file to go on from, [] without --resume or such a file; `meta` then
    describes their loads too."""
    if not args.resume or not Path(args.json).exists():
        return []
    try:
        result = provenance.load(args.json)
        rows = resume.kept(result, meta, [run.key for run in runs])
    except ValueError as error:
        sys.exit(f"--resume: {args.json}: {error}")
    meta["loads"] = result["meta"]["loads"] | meta["loads"]
    return rows


def _settings(args) -> dict:
    names = ("model_shape", "max_running", "seed", "length_scale", "count_scale")
    chosen = {name: getattr(args, name) for name in names}
    return chosen | {
        "device": args.device.type,
        "baseline": args.backends[0],
        "server_arguments": args.server_arguments,
    }


def _tell(text: str) -> None:
    print(text, flush=True)


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[Load]]:
    parser = argparse.ArgumentParser(prog="python -m eval.bench_serving", description=__doc__)
    parser.add_argument(
        "--backends",
        type=several(str),
        default="default,flashinfer,prefix",
        help="default (what SGLang picks), flashinfer, fa3, prefix, fa3/prefix, prefix:KERNELS ...",
    )
    parser.add_argument(
        "--loads",
        type=several(str),
        default="gsp,unshared",
        help=f"{', '.join(catalogue.NAMES)} or {catalogue.SPELLING}",
    )
    parser.add_argument(
        "--rates",
        type=several(rates.parse),
        default="inf",
        help="inf, requests/s, or such as 70%%; offline: all at once, answers not streamed",
    )
    parser.add_argument("--alternations", type=count, default=1, help="servers of each backend")
    parser.add_argument("--azure-trace", type=Path, metavar="CSV", help="lengths of conversation")
    parser.add_argument("--mooncake-trace", type=Path, metavar="JSONL", help="the load mooncake")
    parser.add_argument("--length-scale", type=amount, default=1.0, help="of prompts and outputs")
    parser.add_argument("--count-scale", type=amount, default=1.0, help="of requests or groups")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model-shape", default="llama3.1-8b", choices=list(SHAPES))
    parser.add_argument("--max-running", type=count, default=256, help="requests of a decode step")
    parser.add_argument(
        "--server-arguments", type=shlex.split, default="", help="others of sglang.launch_server"
    )
    parser.add_argument("--port", type=count, help="of the servers; otherwise a free one")
    parser.add_argument("--start-timeout", type=amount, default=900, help="seconds for a server")
    parser.add_argument("--device", type=device, default="cuda")
    parser.add_argument("--json", type=output, metavar="OUT")
    parser.add_argument(
        "--plot", type=output, metavar="OUT.png", help="latency over the rate, per load"
    )
    parser.add_argument("--resume", action="store_true", help="keep whole loads that OUT has")
    args = parser.parse_args(argv)
    if args.resume and not args.json:
        parser.error("--resume needs --json")
    for name in ("backends", "loads"):
        values = getattr(args, name)
        if len(set(values)) < len(values):
            parser.error(f"argument --{name}: names one twice")
    choice = catalogue.Choice(
        seed=args.seed,
        longest=SHAPES[args.model_shape]["max_position_embeddings"] - 8,
        scale=Scale(args.length_scale, args.count_scale),
        azure=args.azure_trace,
        mooncake=args.mooncake_trace,
    )
    try:
        args.rates = rates.in_order(args.rates)
        return args, [catalogue.build(name, choice) for name in args.loads]
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
