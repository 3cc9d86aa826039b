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
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from eval import provenance
from eval.bench_serving import rates
from eval.bench_serving.client import Client, lacks_datasets
from eval.bench_serving.load_arguments import SEED, SETTINGS, add_load_arguments, loads_of
from eval.bench_serving.runs import Run, measure, save_in_turn
from eval.cli_values import benchmark
from eval.engine_process import end_on_sigterm
from eval.model_shapes import SHAPES
from eval.server_process import random_server
from eval.word_tokenizer import write_word_model
from eval.workloads.load import Load


def main(argv: list[str]) -> int:
    args, loads = _parse(argv)
    end_on_sigterm()
    settings = {name: getattr(args, name) for name in (*SETTINGS, "server_arguments")} | {
        "seed": SEED, "device": args.device.type, "baseline": args.backends[0],
    }  # fmt: skip
    facts = {load.name: load.facts() for load in loads}
    meta = provenance.collect("eval.bench_serving", argv, settings=settings, loads=facts)
    if lacks_datasets():
        print("the package `datasets` is missing: SGLang's client gets a stand-in, MMMU is unused")
    with tempfile.TemporaryDirectory(prefix="bench-serving-") as name:
        folder, words = Path(name), SHAPES[args.model_shape]["vocab_size"]
        model = write_word_model(folder / "model", args.model_shape)
        client = Client(model, words, folder / "runs", SEED)

        def serve(turn: int, backend: str, rows: list[dict]) -> Iterator[dict]:
            runs = [Run(backend, turn, load, rate) for load, rate in product(loads, args.rates)]
            return _serve(args, runs, rows, client, folder / f"servers-{turn}")

        return save_in_turn(args, meta, len(loads) * len(args.rates), serve)


def _serve(args, runs: list[Run], rows: list[dict], client: Client, folder: Path):
    """Yield rows of runs of one backend on a server of its own. Raises ServerError."""
    backend, on_cpu = runs[0].backend, args.device.type == "cpu"
    with random_server(
        backend, client.model, folder, args.max_running, *args.server_arguments, on_cpu=on_cpu
    ) as server:
        start_s = server.wait_until_healthy()
        print(f"{backend} is up after {start_s:.0f} s", flush=True)
        for row in measure(runs, server, client, rows, args.backends[0]):
            yield row | {"start_s": round(start_s, 1)}


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[Load]]:
    parser = benchmark("eval.bench_serving", __doc__, SHAPES, "default,flashinfer,prefix", 1)
    add_load_arguments(parser, "gsp,unshared")
    says = "inf, requests/s, or such as 70%%; offline: all at once, answers not streamed"
    parser.add_argument("--rates", type=rates.parse_all, default="inf", help=says)
    parser.add_argument(
        "--server-arguments", type=shlex.split, default="", help="others of sglang.launch_server"
    )
    args = parser.parse_args(argv)
    try:
        args.rates = rates.in_order(args.rates)
    except ValueError as error:
        parser.error(str(error))
    return args, loads_of(parser, args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
