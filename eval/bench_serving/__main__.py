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
from eval.bench_serving import rates
from eval.bench_serving.client import Client, lacks_datasets
from eval.bench_serving.runs import Run, measure
from eval.cli_values import amount, benchmark, names, several
from eval.dummy_engine import in_turn
from eval.engine_process import end_on_sigterm
from eval.model_shapes import SHAPES
from eval.server_process import ServerError, random_server
from eval.word_tokenizer import write_word_model
from eval.workloads import catalogue
from eval.workloads.load import Load, Scale
from sgl_prefix_attn.tools.argument_types import count

_SEED = 1
_RUNNING = "requests of a step; behind a prompt in chunks SGLang admits one less"


def main(argv: list[str]) -> int:
    args, loads = _parse(argv)
    end_on_sigterm()
    chosen = ("model_shape", "max_running", "length_scale", "count_scale", "server_arguments")
    settings = {name: getattr(args, name) for name in chosen} | {
        "seed": _SEED, "device": args.device.type, "baseline": args.backends[0],
    }  # fmt: skip
    facts = {load.name: load.facts() for load in loads}
    meta = provenance.collect("eval.bench_serving", argv, settings=settings, loads=facts)
    turns = list(in_turn(args.backends, args.alternations))
    wanted = len(turns) * len(loads) * len(args.rates)
    rows: list[dict] = []
    print(f"{wanted} runs", flush=True)
    if lacks_datasets():
        print("the package `datasets` is missing: SGLang's client gets a stand-in, MMMU is unused")
    with tempfile.TemporaryDirectory(prefix="bench-serving-") as name:
        folder, words = Path(name), SHAPES[args.model_shape]["vocab_size"]
        model = write_word_model(folder / "model", args.model_shape)
        client = Client(model, words, folder / "runs", _SEED)
        for turn, backend in turns:
            runs = [Run(backend, turn, load, rate) for load, rate in product(loads, args.rates)]
            try:
                for row in _serve(args, runs, rows, client, folder / f"servers-{turn}"):
                    rows.append(row)
                    provenance.save(args.json, meta, rows)
            except ServerError as error:
                print(f"{backend} stopped: {error}", file=sys.stderr, flush=True)
    if missing := wanted - len(rows):
        print(f"{missing} of {wanted} runs failed or were left out", file=sys.stderr)
    return int(missing > 0)


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
    parser.add_argument(
        "--loads", type=names, default="gsp,unshared",
        help=f"{', '.join(catalogue.NAMES)} or {catalogue.SPELLING}",
    )  # fmt: skip
    says = "inf, requests/s, or such as 70%%; offline: all at once, answers not streamed"
    parser.add_argument("--rates", type=several(rates.parse), default="inf", help=says)
    parser.add_argument("--azure-trace", type=Path, metavar="CSV", help="lengths of conversation")
    parser.add_argument("--mooncake-trace", type=Path, metavar="JSONL", help="the load mooncake")
    parser.add_argument("--length-scale", type=amount, default=1.0, help="of prompts and outputs")
    parser.add_argument("--count-scale", type=amount, default=1.0, help="of requests or groups")
    parser.add_argument("--max-running", type=count, default=256, help=_RUNNING)
    parser.add_argument(
        "--server-arguments", type=shlex.split, default="", help="others of sglang.launch_server"
    )
    args = parser.parse_args(argv)
    choice = catalogue.Choice(
        seed=_SEED, longest=SHAPES[args.model_shape]["max_position_embeddings"] - 8,
        scale=Scale(args.length_scale, args.count_scale), azure=args.azure_trace,
        mooncake=args.mooncake_trace,
    )  # fmt: skip
    try:
        args.rates = rates.in_order(args.rates)
        return args, [catalogue.build(name, choice) for name in args.loads]
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
