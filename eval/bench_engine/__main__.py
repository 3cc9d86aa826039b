"""python -m eval.bench_engine: TPOT of SGLang with each attention backend, random weights.

Every backend but the first, the baseline, is measured beside an engine of it on the same GPU, one
process each, alternating; the ratio is that of the medians. Dummy weights are fine for timing and
useless for comparing outputs (eval.compare_outputs does that).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from eval.bench_engine import host_times
from eval.bench_engine.decode_times import alternate, pool_tokens, times_of
from eval.bench_engine.workloads import NAMED, workload
from eval.cli_values import add_engine_arguments, benchmark, json_object, several
from eval.dummy_engine import engine_arguments, run_all, side_by_side
from eval.engine_process import uses_prefix
from eval.model_shapes import SHAPES, write_config
from sgl_prefix_attn.tools.argument_types import count


def main(argv: list[str]) -> int:
    parser = benchmark("eval.bench_engine", __doc__, SHAPES, "flashinfer,prefix", 5, "64,256")
    parser.add_argument(
        "--workloads", type=several(workload), default=",".join(NAMED),
        help="or 64x8192+256, or 16*16x1024+0..512: groups",
    )  # fmt: skip
    parser.add_argument("--page-size", type=count, default=1)
    add_engine_arguments(parser)
    parser.add_argument(
        "--baseline-arguments", type=json_object, default={}, metavar="JSON",
        help="of the first backend alone, over --engine-arguments",
    )  # fmt: skip
    args = parser.parse_args(argv)
    baseline, *others = args.backends
    groups = [[baseline, other] for other in others] or [[baseline]]
    runs = [partial(_run_group, args, group) for group in groups]
    return run_all("eval.bench_engine", argv, args, runs, _text, baseline=baseline)


def _run_group(args, group: list[str], folder: Path, before: list[dict]) -> Iterator[dict]:
    """Yield the rows of engines side by side, those of the baseline once."""
    arguments = engine_arguments(
        write_config(folder / "model", args.model_shape), device=args.device,
        page_size=args.page_size, pool_tokens=pool_tokens(args.workloads, args.new_tokens),
        decode_batches=sorted({workload.batch for workload in args.workloads}),
    ) | args.engine_arguments  # fmt: skip
    baseline, times = group[0], dict[str, Path]()

    def watched(backend: str, home: Path) -> dict:
        times[backend] = home / "host.json"
        plugin = host_times.__name__ if uses_prefix(backend) else None
        own = args.baseline_arguments if backend == baseline else {}
        env = {host_times.ENV: str(times[backend])}
        return {"plugin": plugin, "env": env, "arguments": own}

    is_known = any(row["backend"] == baseline for row in before)
    with side_by_side(group, folder, arguments, more=watched) as engines:
        for workload in args.workloads:
            earlier = {backend: host_times.read(path) for backend, path in times.items()}
            prompts = workload.prompts(SHAPES[args.model_shape]["vocab_size"])
            samples = alternate(engines, workload, prompts, args.new_tokens, args.alternations)
            for backend in group[1:] if is_known else group:
                yield {
                    "backend": backend, **workload.facts(), "page_size": args.page_size,
                    **times_of(samples[backend], samples[baseline], args.new_tokens),
                    "beside": next((b for b in group if b != backend), None),
                    "plugins": engines[backend].plugins,
                    "host": host_times.read(times[backend], earlier[backend]),
                }  # fmt: skip


def _text(row: dict) -> str:
    each = row["each_tpot_ms"]
    text = (
        f"  {row['workload']:<10} {row['backend']:<14} TPOT {row['tpot_ms']:8.3f} ms "
        f"({min(each):.3f} to {max(each):.3f})  ratio {row['ratio']:.3f}"
    )
    if row["host"].get("steady_us") is not None:
        text += f"  our host code {row['host']['steady_us']:.1f} us per steady step"
    return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
