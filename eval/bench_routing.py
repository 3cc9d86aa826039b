"""python -m eval.bench_routing: what a router's policy does to sharing.

Servers with random weights, one on each GPU, behind SGLang's router: of each backend they serve
every load under every policy, each time from empty caches, though a policy's router remembers
earlier runs. Cache-aware routing keeps requests that
begin alike on one server; round robin spreads them, so that every server computes and reads their
prefix. A report: nothing is asserted.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path

import torch

from eval import provenance
from eval.bench_serving import rates, serving_row
from eval.bench_serving.client import Client, ClientError
from eval.bench_serving.load_arguments import SEED, SETTINGS, add_load_arguments, loads_of
from eval.bench_serving.runs import Run, save_in_turn, serve, warm_up
from eval.cli_values import benchmark, names_of
from eval.engine_process import end_on_sigterm, folder_name
from eval.model_shapes import SHAPES
from eval.router_process import POLICIES, RouterProcess
from eval.server_process import ServerProcess, random_server
from eval.word_tokenizer import write_word_model
from eval.workloads.load import Load
from sgl_prefix_attn.tools.argument_types import count

_ON_CPU = 2  # servers beside each other, where no GPU limits them


def main(argv: list[str]) -> int:
    args, loads = _parse(argv)
    end_on_sigterm()
    settings = {name: getattr(args, name) for name in (*SETTINGS, "servers")}
    settings |= {"seed": SEED, "device": args.device.type}
    facts = {load.name: load.facts() for load in loads}
    meta = provenance.collect("eval.bench_routing", argv, settings=settings, loads=facts)
    with tempfile.TemporaryDirectory(prefix="bench-routing-") as name:
        folder = Path(name)
        model = write_word_model(folder / "model", args.model_shape)

        def serve_all(turn: int, backend: str, _) -> Iterator[dict]:
            runs = [Run(backend, turn, *pair) for pair in product(loads, args.rates)]
            return _serve(args, runs, model, folder / f"{turn}-{folder_name(backend)}")

        wanted = len(args.policies) * len(loads) * len(args.rates)
        return save_in_turn(args, meta, wanted, serve_all)


def _serve(args, runs: list[Run], model: Path, folder: Path) -> Iterator[dict]:
    """Yield rows of runs of one backend under every policy. Raises ServerError."""
    words = SHAPES[args.model_shape]["vocab_size"]
    with ExitStack() as stack:
        servers = [
            stack.enter_context(_server(args, runs[0].backend, model, folder / str(number), number))
            for number in range(args.servers)
        ]
        for server in servers:
            server.wait_until_healthy()
        for policy in args.policies:
            client = Client(model, words, folder / f"runs-{policy}", SEED)
            with RouterProcess(servers, policy, log=folder / f"{policy}.log") as router:
                router.wait_until_healthy()
                yield from _route(runs, policy, router, client)


def _server(args, backend: str, model: Path, folder: Path, number: int) -> ServerProcess:
    on_cpu = args.device.type == "cpu"
    place = () if on_cpu else ("--base-gpu-id", str(number))
    return random_server(backend, model, folder, args.max_running, *place, on_cpu=on_cpu)


def _route(runs: list[Run], policy: str, router: RouterProcess, client: Client) -> Iterator[dict]:
    for run in runs:
        print(f"{run}, {policy} ...", flush=True)
        warm_up(run.load, router, client)
        before = router.requests()
        try:
            found = serve(run, run.rate.per_s, router, client)
        except ClientError as error:
            print(f"  left out: {error}", flush=True)
            continue
        shares = [after - of for after, of in zip(router.requests(), before, strict=True)]
        print(f"  {serving_row.text(found)}; of the servers {shares}", flush=True)
        yield {
            "backend": run.backend, "policy": policy, "load": run.load.name,
            "rate": run.rate.label, "alternation": run.alternation, "requests": shares, **found,
        }  # fmt: skip


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[Load]]:
    parser = benchmark("eval.bench_routing", __doc__, SHAPES, "default,prefix", 1)
    parser.add_argument(
        "--policies", type=names_of(POLICIES), default="cache_aware,round_robin",
        help=f"of SGLang's router: {', '.join(POLICIES)}",
    )  # fmt: skip
    parser.add_argument("--servers", type=count, help=f"all GPUs, on a CPU {_ON_CPU}")
    add_load_arguments(parser, "gsp,fewshot,grpo16")
    says = "inf, requests/s; offline: all at once, answers not streamed"
    parser.add_argument("--rates", type=rates.parse_all, default="offline", help=says)
    args = parser.parse_args(argv)
    if args.servers is None:
        args.servers = _ON_CPU if args.device.type == "cpu" else torch.cuda.device_count()
    if importlib.util.find_spec("sglang_router") is None:
        parser.error("SGLang's router is missing: pip install sglang-router")
    if shares := [rate.label for rate in args.rates if rate.share is not None]:
        parser.error(f"argument --rates: {shares[0]} is a share of what no run here says")
    return args, loads_of(parser, args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
