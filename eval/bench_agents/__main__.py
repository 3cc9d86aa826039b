"""python -m eval.bench_agents: agent programs on a server of each backend in turn, random weights.

The programs are those of eval/examples, at least 64 at once through SGLang's own frontend. Weights
are random, so nothing that a server generates chooses anything: which tool result or idea comes
next is drawn beforehand, every request makes exactly as many tokens as it may, and choices are
equally long. Requests, prompt tokens and output tokens are counted by the server and must be equal
for all backends: exit status 1 otherwise. All of a program's time is in its wall time: prefill, the
server's tokenizer and the client, too.

Expected on an H200 in bf16 at the 8B shape, from bytes alone: a decode step takes 5.2 ms (64
requests) to 7.5 ms (256) beside attention; a KV token has 128 KiB in all layers and is read from
memory at 4.2 TB/s, or at twice that where a layer's shared part (4 KiB a token) fits the L2 cache.

                     requests  tokens shared by  own     a step of         ratio of
                     running   many     four     tokens  stock    prefix   steps  wall times
    tool_agents      64        6144     -        700     12.7 ms  6.9 ms   0.54   0.70
    tree_of_thought  256       4096     386      70      27.5 ms  9.0 ms   0.33   0.55
    judge            256       4096     768      100     30.8 ms  10.0 ms  0.32   0.65
    document_qa      256       6144     64       70      57.7 ms  9.6 ms   0.17   0.45

Many are all requests, or a library's 32 in document_qa, whose eight libraries do not fit the cache.
Wall times also hold what is the same for every backend: phases without branches, prefill, and the
text of every request tokenized anew, at about a million tokens a second. Geometric mean: 0.58.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from eval import provenance
from eval.bench_agents import agent_tables, runs
from eval.cli_values import device, output
from eval.dummy_engine import in_turn
from eval.engine_process import end_on_sigterm
from eval.model_shapes import SHAPES
from eval.server_process import ServerError, backend_server
from eval.word_tokenizer import write_word_model
from sgl_prefix_attn.cli.argument_types import count

_WARM_UP_SCALE = 8  # of sizes in tokens: as many requests at once, in an eighth of the time
_ON_CPU = ("--max-total-tokens", "32768")


def main(argv: list[str]) -> int:
    args = _parse(argv)
    end_on_sigterm()
    meta = provenance.collect(
        "eval.bench_agents",
        argv,
        model_shape=args.model_shape,
        sizes={program: runs.sizes(program, args.scale) for program in args.programs},
    )
    rows: list[dict] = []
    failed = False
    for alternation, backend in in_turn(args.backends, args.alternations):
        with tempfile.TemporaryDirectory(prefix="bench-agents-") as folder:
            try:
                for row in _serve(backend, Path(folder), args):
                    rows.append({"alternation": alternation, **row})
                    print(_text(rows[-1]), flush=True)
                    if args.json:
                        provenance.save(args.json, meta, rows)
            except (ServerError, runs.ProgramError) as error:
                failed = True
                print(f"{backend}: {error}\n{getattr(error, 'log_tail', '')}", file=sys.stderr)
    problems = runs.unequal(rows)
    for problem in problems:
        print(f"not the same work: {problem}", file=sys.stderr)
    if rows:
        print(agent_tables.markdown(rows))
    return 1 if failed or problems else 0


def _serve(backend: str, folder: Path, args):
    """Yield the row of each program, all on one server. Raises ServerError and ProgramError."""
    print(f"starting {backend}", flush=True)
    on_cpu = args.device.type == "cpu"
    server = backend_server(
        backend,
        write_word_model(folder / "model", args.model_shape),
        folder,
        arguments=(
            *("--load-format", "dummy", "--enable-metrics", "--random-seed", "1"),
            *("--grammar-backend", "none", "--max-running-requests", str(args.max_running)),
            *(_ON_CPU if on_cpu else ("--cuda-graph-max-bs-decode", str(args.max_running))),
        ),
        on_cpu=on_cpu,
    )
    with server:
        server.wait_until_healthy()
        print(f"{backend} is up; warming up", flush=True)
        for program in args.programs:
            runs.run(server, program, args.count, seed=1, scale=args.scale * _WARM_UP_SCALE)
        for program in args.programs:
            figures = runs.run(server, program, args.count, seed=0, scale=args.scale, progress=True)
            yield {"program": program, "backend": backend, "count": args.count, **figures}


def _text(row: dict) -> str:
    tpot = "-" if row["tpot_ms"] is None else f"{row['tpot_ms']:.2f} ms"
    return (
        f"  {row['program']:<15} {row['backend']:<14} {row['wall_s']:7.2f} s, "
        f"{row['tokens_per_s']:6.0f} tokens/s, TPOT {tpot}, cached {row['cached_share']:.3f}, "
        f"{row['prefix_steps']} prefix steps"
    )


def _parse(argv: list[str]):
    parser = argparse.ArgumentParser(
        prog="python -m eval.bench_agents",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--backends",
        help="such as default,flashinfer,fa3/prefix; default: what SGLang picks (of a GPU "
        "default,flashinfer,prefix, on a CPU torch_native,prefix)",
    )
    parser.add_argument("--programs", default="all", help=f"of {', '.join(runs.PROGRAMS)}")
    parser.add_argument("--count", type=count, default=64, help="of each program, at once")
    parser.add_argument("--scale", type=count, default=1, help="divides all sizes in tokens")
    parser.add_argument("--alternations", type=count, default=1, help="servers of each backend")
    parser.add_argument("--max-running", type=count, default=256, help="requests of a decode step")
    parser.add_argument("--model-shape", default="llama3.1-8b", choices=list(SHAPES))
    parser.add_argument("--device", type=device, default="cuda")
    parser.add_argument("--json", type=output, metavar="OUT")
    args = parser.parse_args(argv)
    of_device = "torch_native,prefix" if args.device.type == "cpu" else "default,flashinfer,prefix"
    args.backends = (args.backends or of_device).split(",")
    args.programs = list(runs.PROGRAMS) if args.programs == "all" else args.programs.split(",")
    for option, names in (("--backends", args.backends), ("--programs", args.programs)):
        if len(set(names)) < len(names):
            parser.error(f"argument {option}: names one twice")
    unknown = [name for name in args.programs if name not in runs.PROGRAMS]
    if unknown:
        parser.error(
            f"argument --programs: {unknown[0]!r}, known are {', '.join(runs.PROGRAMS)} and all"
        )
    return args


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
