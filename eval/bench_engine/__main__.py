"""python -m eval.bench_engine: TPOT of SGLang with each attention backend, random weights.

Every backend but the baseline is measured beside an engine of the baseline on the same GPU, one
process each, alternating; the ratio is that of the medians. Dummy weights are fine for timing and
useless for comparing outputs (eval.compare_outputs does that).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path

from eval import provenance
from eval.bench_engine import engine_plugin, host_times
from eval.bench_engine.decode_times import Samples, alternate, each_tpot_ms, tpot_ms
from eval.bench_engine.workloads import NAMED, Workload, parse_workloads
from eval.cli_values import device, output, several
from eval.dummy_engine import engine_arguments, start, wait_until_up
from eval.engine_process import EngineError, end_on_sigterm, folder_name, uses_prefix
from eval.model_shapes import SHAPES, write_config
from sgl_prefix_attn.cli.argument_types import count

# KV pool over what the largest workload needs: room for outputs of earlier generations.
_POOL_MARGIN = 1.4


def main(argv: list[str]) -> int:
    args, workloads, new_tokens = _parse(argv)
    backends = list(dict.fromkeys(args.backends.split(",")))
    others = [b for b in backends if b != args.baseline]
    groups = [[args.baseline, other] for other in others] or [[args.baseline]]
    end_on_sigterm()
    meta = provenance.collect(
        "eval.bench_engine", argv, model_shape=args.model_shape, baseline=args.baseline
    )
    rows: list[dict] = []
    failed = False
    for group in groups:
        with tempfile.TemporaryDirectory(prefix="bench-engine-") as folder:
            try:
                _run_group(group, Path(folder), args, workloads, new_tokens, rows)
            except EngineError as error:
                failed = True
                print(f"{' and '.join(group)} failed: {error}", file=sys.stderr)
        if args.json and rows:
            provenance.save(args.json, meta, rows)
    return 1 if failed else 0


def _run_group(group, folder: Path, args, workloads, new_tokens, rows: list[dict]) -> None:
    model = write_config(folder / "model", args.model_shape)
    pool = max(workload.kv_tokens(new_tokens[1]) for workload in workloads)
    arguments = engine_arguments(
        model,
        device=args.device,
        page_size=args.page_size,
        pool_tokens=int(_POOL_MARGIN * pool) + 1024,
        decode_batches=sorted({workload.batch for workload in workloads}),
    )
    with contextlib.ExitStack() as stack:
        engines, times = {}, {}
        for backend in group:
            home = folder / folder_name(backend)
            times[backend] = home / "host.json"
            plugin = engine_plugin.__name__ if uses_prefix(backend) else None
            name = backend.removesuffix(engine_plugin.IN_ORDER)
            env = {host_times.ENV: str(times[backend])}
            env |= {engine_plugin.ENV: "1"} if name != backend else {}
            engines[backend] = start(stack, name, home, arguments, plugin=plugin, env=env)
        wait_until_up(engines)
        for workload in workloads:
            before = {backend: host_times.read(path) for backend, path in times.items()}
            samples = alternate(
                engines,
                workload,
                SHAPES[args.model_shape]["vocab_size"],
                new_tokens,
                args.alternations,
                lambda text: print(text, flush=True),
            )
            base = samples[args.baseline]
            for backend in group:
                known = backend == args.baseline and any(
                    r["backend"] == backend and r["workload"] == workload.name for r in rows
                )
                row = _row(backend, workload, args, samples[backend], new_tokens, base)
                row["beside"] = next((b for b in group if b != backend), None)
                row["plugins"] = engines[backend].plugins
                row["host"] = host_times.read(times[backend], before[backend])
                if not known:  # the baseline is measured again beside every other backend
                    rows.append(row)
                print(_text(row), flush=True)


def _row(
    backend: str, workload: Workload, args, samples: Samples, new_tokens, base: Samples
) -> dict:
    tpot = tpot_ms(samples, new_tokens)
    base_tpot = tpot_ms(base, new_tokens)
    return {
        "backend": backend,
        "workload": workload.name,
        "page_size": args.page_size,
        "batch": workload.batch,
        "shared": workload.shared,
        "private": workload.private,
        "alternations": len(samples.long),
        "tpot_ms": tpot,
        "ratio": tpot / base_tpot,
        "baseline_tpot_ms": base_tpot,
        "each_tpot_ms": each_tpot_ms(samples, new_tokens),
        "baseline_each_tpot_ms": each_tpot_ms(base, new_tokens),
        "seconds_short": samples.short,
        "seconds_long": samples.long,
    }


def _text(row: dict) -> str:
    each = row["each_tpot_ms"]
    text = (
        f"  {row['workload']:<10} {row['backend']:<14} TPOT {row['tpot_ms']:8.3f} ms "
        f"({min(each):.3f} to {max(each):.3f})  ratio {row['ratio']:.3f}"
    )
    if row["host"].get("steady_us") is not None:
        text += f"  our host code {row['host']['steady_us']:.1f} us per steady step"
    return text


def _parse(argv: list[str]):
    parser = argparse.ArgumentParser(prog="python -m eval.bench_engine", description=__doc__)
    parser.add_argument("--model-shape", default="llama3.1-8b", choices=list(SHAPES))
    parser.add_argument(
        "--backends",
        default="prefix,flashinfer",
        help="such as prefix,flashinfer,fa3,fa3/prefix; prefix:KERNELS forces its kernels, "
        "prefix:row_tiles:in_order launches them behind the kernel before",
    )
    parser.add_argument("--baseline", default="flashinfer")
    parser.add_argument("--workloads", default=",".join(NAMED), help="or 64x8192+256")
    parser.add_argument("--alternations", type=count, default=5)
    parser.add_argument(
        "--new-tokens", type=several(count), default="64,256", help="short and long generation"
    )
    parser.add_argument("--page-size", type=count, default=1)
    parser.add_argument("--device", type=device, default="cuda")
    parser.add_argument("--json", type=output, metavar="OUT")
    args = parser.parse_args(argv)
    try:
        workloads = parse_workloads(args.workloads)
    except ValueError as error:
        parser.error(str(error))
    if len(args.new_tokens) != 2 or args.new_tokens[0] >= args.new_tokens[1]:
        parser.error("argument --new-tokens: expected SHORT,LONG")
    return args, workloads, tuple(args.new_tokens)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
