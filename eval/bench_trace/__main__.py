"""python -m eval.bench_trace: a recorded trace against several backends, random weights.

All engines are up at the same time on one GPU, one process each, and replay the same requests at
the same times in turn. The first backend is what the others are compared with. A report: nothing
is asserted. Every engine starts each replay with an empty radix cache.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path

from eval import provenance
from eval.bench_trace import replay_figures, trace, trace_tables
from eval.bench_trace.replays import alternate, warm_up, write_requests
from eval.cli_values import amount, device, output, several
from eval.dummy_engine import engine_arguments, start, wait_until_up
from eval.engine_process import EngineError, end_on_sigterm, folder_name
from eval.model_shapes import SHAPES, write_config
from sgl_prefix_attn.cli.argument_types import count

# Captured decode batches up to --max-running, which is captured too.
_BATCHES = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 96, 128, 160, 192, 224, 256)


def main(argv: list[str]) -> int:
    args, windows = _parse(argv)
    end_on_sigterm()
    meta = provenance.collect(
        "eval.bench_trace", argv, model_shape=args.model_shape, trace=Path(args.trace).name
    )
    rows: list[dict] = []
    status = 0
    with tempfile.TemporaryDirectory(prefix="bench-trace-") as folder:
        try:
            _run(Path(folder), args, windows, meta, rows)
        except EngineError as error:
            status = 1
            print(f"stopped after {len(rows)} replays: {error}", file=sys.stderr)
    if rows:
        print(trace_tables.markdown(rows, meta["trace"]))
    return status


def _run(folder: Path, args, windows: dict[float, trace.Window], meta: dict, rows: list) -> None:
    model = write_config(folder / "model", args.model_shape)
    block = trace.scaled_block(args.length_scale)
    files = {
        rate: write_requests(
            folder / f"{rate:g}.json", window, block, SHAPES[args.model_shape]["vocab_size"]
        )
        for rate, window in windows.items()
    }
    arguments = engine_arguments(
        model,
        device=args.device,
        page_size=args.page_size,
        pool_tokens=args.pool_tokens,
        decode_batches=[b for b in _BATCHES if b < args.max_running] + [args.max_running],
    )
    with contextlib.ExitStack() as stack:
        engines = {}
        for backend in args.backends:
            engine = start(stack, backend, folder / folder_name(backend), arguments)
            wait_until_up({backend: engine})  # each finds what room the ones before have left
            if engine.pool_tokens < arguments["max_total_tokens"]:
                raise EngineError(
                    f"{backend} has room for {engine.pool_tokens} KV tokens only: --pool-tokens "
                    f"{args.pool_tokens} is too much for {len(args.backends)} engines"
                )
            engines[backend] = engine
        warm_up(engines, files[max(files)])  # its requests are those of the other rates and more
        for rate, window in windows.items():
            for backend, alternation, timed in alternate(engines, files[rate], args.alternations):
                row = replay_figures.row(backend, rate, alternation, window, timed)
                rows.append(row | {"plugins": engines[backend].plugins})
                print(_text(row), flush=True)
                if args.json:
                    provenance.save(args.json, meta, rows)


def _text(row: dict) -> str:
    times = []
    for metric in replay_figures.METRICS:
        values = "/".join("-" if v is None else f"{v:.2f}" for v in row[metric].values())
        times.append(f"{metric.removesuffix('_ms').upper()} {values} ms")
    failed = f"; first error: {row['error']}" if row["error"] else ""
    return (
        f"  {row['rate']:g}/s {row['alternation']} {row['backend']:<14} {', '.join(times)} "
        f"(median/p90/p99); {row['completed']} of {row['sent']}, {row['achieved_rate']:.2f}/s; "
        f"late at most {row['late_ms']['max']:.1f} ms{failed}"
    )


def _parse(argv: list[str]):
    parser = argparse.ArgumentParser(prog="python -m eval.bench_trace", description=__doc__)
    parser.add_argument("--trace", required=True, metavar="PATH", help="JSONL, Mooncake's format")
    parser.add_argument(
        "--backends", help="first: the stock one (flashinfer,prefix; on a CPU torch_native,prefix)"
    )
    parser.add_argument(
        "--rates", type=several(amount), default="0.5,1", help="requests a second, each replayed"
    )
    parser.add_argument("--seconds", type=amount, default=60, help="arrivals of a replay last this")
    parser.add_argument("--skip", type=float, default=0, help="seconds of the trace left out")
    parser.add_argument("--length-scale", type=amount, default=1.0, help="of prompts and outputs")
    parser.add_argument("--alternations", type=count, default=5)
    parser.add_argument("--model-shape", default="llama3.1-8b", choices=list(SHAPES))
    parser.add_argument("--page-size", type=count, default=1)
    parser.add_argument(
        "--pool-tokens", type=count, default=98304, help="KV tokens of each engine; all must fit"
    )
    parser.add_argument("--max-running", type=count, default=64, help="requests of a decode step")
    parser.add_argument("--device", type=device, default="cuda")
    parser.add_argument("--json", type=output, metavar="OUT")
    args = parser.parse_args(argv)
    stock = "flashinfer" if args.device.type == "cuda" else "torch_native"
    args.backends = (args.backends or f"{stock},prefix").split(",")
    if len(set(args.backends)) < len(args.backends):
        parser.error("--backends names one twice")
    context = SHAPES[args.model_shape]["max_position_embeddings"]
    longest = min(context, args.pool_tokens // 64 * 64) - 2 * args.page_size
    try:
        requests = trace.scale(trace.read(args.trace), args.length_scale)
        windows = {
            rate: trace.window(requests, rate, args.seconds, args.skip, longest)
            for rate in args.rates
        }
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return args, windows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
