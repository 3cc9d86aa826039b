"""python -m eval.bench_trace: a recorded trace against several backends, random weights.

All engines are up at the same time on one GPU, one process each, and replay the same requests at
the same times in turn. The first backend is what the others are compared with. A report: nothing
is asserted. Every engine starts each replay with an empty radix cache.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import orjson

from eval import provenance
from eval.bench_trace import replay_figures, trace
from eval.cli_values import amount, benchmark, several
from eval.dummy_engine import engine_arguments, in_turn, keep, side_by_side
from eval.engine_process import EngineError, end_on_sigterm
from eval.model_shapes import SHAPES, write_config
from eval.workloads import load
from sgl_prefix_attn.tools.argument_types import count

_SEED = 0  # of the tokens
_BATCHES = [1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64]  # captured; no more requests run at once


def main(argv: list[str]) -> int:
    args, windows = _parse(argv)
    end_on_sigterm()
    meta = provenance.collect(
        "eval.bench_trace", argv, model_shape=args.model_shape, trace=Path(args.trace).name
    )
    rows: list[dict] = []
    with tempfile.TemporaryDirectory(prefix="bench-trace-") as folder:
        failed = keep(_run(Path(folder), args, windows), rows, args.json, meta, _text)
    if rows:
        print(replay_figures.markdown(rows))
    return int(failed)


def _run(folder: Path, args, windows: dict[float, trace.Window]) -> Iterator[dict]:
    """Yield the row of each replay. Raises EngineError."""
    files = {
        rate: write_requests(folder / f"{rate:g}.json", window, args)
        for rate, window in windows.items()
    }
    arguments = engine_arguments(
        write_config(folder / "model", args.model_shape), device=args.device, page_size=1,
        pool_tokens=args.pool_tokens, decode_batches=_BATCHES,
    )  # fmt: skip
    with side_by_side(args.backends, folder, arguments, one_by_one=True) as engines:
        for backend, engine in engines.items():
            if engine.pool_tokens < arguments["max_total_tokens"]:
                raise EngineError(
                    f"{backend} has room for {engine.pool_tokens} KV tokens only: --pool-tokens "
                    f"{args.pool_tokens} is too much for {len(args.backends)} engines"
                )
        for engine in engines.values():  # not counted: every new prompt length costs ms at first
            engine.ask("replay", path=str(files[max(files)]))  # the other rates' requests and more
        for rate, window in windows.items():
            for alternation, backend in in_turn(engines, args.alternations):
                timed = engines[backend].ask("replay", path=str(files[rate]))["requests"]
                row = replay_figures.row(backend, rate, alternation, window, timed)
                yield row | {"plugins": engines[backend].plugins}


def write_requests(path: Path, window: trace.Window, args) -> Path:
    """Write the window as the file that every engine replays."""
    prompts = load.prompts(window.requests, _SEED, SHAPES[args.model_shape]["vocab_size"])
    requests = [
        {"at": request.at, "ids": ids, "new_tokens": request.output}
        for request, ids in zip(window.requests, prompts, strict=True)
    ]
    path.write_bytes(orjson.dumps(requests))
    return path


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
    parser = benchmark("eval.bench_trace", __doc__, SHAPES, "", 5)
    parser.add_argument("--trace", required=True, metavar="PATH", help="JSONL, Mooncake's format")
    parser.add_argument("--rates", type=several(amount), default="0.5,1", help="requests a second")
    parser.add_argument("--seconds", type=amount, default=60, help="arrivals of a replay last this")
    parser.add_argument("--skip", type=float, default=0, help="seconds of the trace left out")
    parser.add_argument("--length-scale", type=amount, default=1.0, help="of prompts and outputs")
    parser.add_argument("--pool-tokens", type=count, default=98304, help="of KV, in each engine")
    args = parser.parse_args(argv)
    stock = "flashinfer" if args.device.type == "cuda" else "torch_native"
    args.backends = args.backends or [stock, "prefix"]
    context = SHAPES[args.model_shape]["max_position_embeddings"]
    longest = min(context, args.pool_tokens // 64 * 64) - 2
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
