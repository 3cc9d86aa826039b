"""python -m eval.bench_speculative: TPOT where a target model verifies chains of a draft model.

Target and draft have random weights; the draft is one layer of the target's shape (EAGLE), or a
model of its own (--draft). SGLang itself accepts as many tokens as it is told to
(SGLANG_SIMULATE_ACC_LEN), for every backend alike.
Engines stand side by side on one GPU and take turns; the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from eval.bench_engine.decode_times import alternate, pool_tokens, times_of
from eval.bench_engine.workloads import workload
from eval.bench_speculative import verify_steps
from eval.cli_values import benchmark
from eval.counters import prefix_share
from eval.dummy_engine import engine_arguments, run_all, side_by_side
from eval.engine_process import EngineError, uses_prefix
from eval.model_shapes import LLAMAS, SHAPES, write_config
from sgl_prefix_attn.tools.argument_types import count


def main(argv: list[str]) -> int:
    backends = "flashinfer,prefix/prefix"
    parser = benchmark("eval.bench_speculative", __doc__, LLAMAS, backends, 3, "48,240")
    parser.add_argument(
        "--workload", type=workload, default="shared8k", help="a name, or 64x8192+256"
    )
    parser.add_argument("--draft", choices=LLAMAS, help="a draft model of this shape")
    parser.add_argument("--speculative", type=speculative, default="4:3", help="DRAFTED:ACCEPTED")
    args = parser.parse_args(argv)
    runs = [lambda folder, _: _run(folder, args)]
    return run_all("eval.bench_speculative", argv, args, runs, _text)


def _run(folder: Path, args) -> Iterator[dict]:
    tokens, accepted = args.speculative
    arguments = engine_arguments(
        write_config(folder / "model", args.model_shape), device=args.device, page_size=1,
        pool_tokens=pool_tokens([args.workload], args.new_tokens),
        decode_batches=[args.workload.batch],
    ) | draft_arguments(folder / "draft", args.model_shape, args.draft, tokens)  # fmt: skip
    counts: dict[str, Path] = {}

    def counted(backend: str, home: Path) -> dict:
        counts[backend] = home / "verify.json"
        env = {"SGLANG_SIMULATE_ACC_LEN": str(accepted), verify_steps.ENV: str(counts[backend])}
        plugin = verify_steps.__name__ if uses_prefix(backend) else None
        return {"plugin": plugin, "env": env, "arguments": verifying_arguments(backend)}

    prompts = args.workload.prompts(SHAPES[args.model_shape]["vocab_size"])
    with side_by_side(args.backends, folder, arguments, more=counted) as engines:
        samples = alternate(engines, args.workload, prompts, args.new_tokens, args.alternations)
        for backend, engine in engines.items():
            answer = engine.ask("time_batch", ids=prompts, new_tokens=args.new_tokens[1])
            if answer["accepted"] is None or abs(answer["accepted"] - accepted) > 0.1:
                raise EngineError(f"{backend} accepts {answer['accepted']} tokens, not {accepted}")
            steps = verify_steps.read(counts[backend], tokens)
            yield {
                "backend": backend, **args.workload.facts(), "page_size": 1, "draft_tokens": tokens,
                "accepted": answer["accepted"],
                **times_of(samples[backend], samples[args.backends[0]], args.new_tokens),
                "verify_steps": steps, "prefix_share": prefix_share(steps),
                "plugins": engine.plugins,
            }  # fmt: skip


def draft_arguments(folder: Path, target: str, draft: str | None, tokens: int) -> dict:
    """Write the config of a draft, EAGLE where none is named, and return arguments of chains."""
    eagle = {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}
    model = write_config(folder, draft) if draft else write_config(folder, target, **eagle)
    return {
        "speculative_algorithm": "STANDALONE" if draft else "EAGLE",
        "speculative_draft_model_path": str(model),
        "speculative_num_steps": tokens - 1,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": tokens,
    }


def verifying_arguments(backend: str) -> dict:
    """Return the engine's arguments by which `prefix` verifies behind another prefill backend."""
    prefill, _, decode = backend.partition("/")
    mixed = uses_prefix(decode) and not uses_prefix(prefill)
    return {"speculative_attention_mode": "decode"} if mixed else {}


def speculative(text: str) -> tuple[int, int]:
    """Parse DRAFTED:ACCEPTED tokens a step."""
    drafted, _, accepted = text.partition(":")
    tokens = count(drafted), count(accepted)
    if not 1 <= tokens[1] <= tokens[0] or tokens[0] < 2:
        raise argparse.ArgumentTypeError(f"expected DRAFTED:ACCEPTED, at least 2:1, got {text}")
    return tokens


def _text(row: dict) -> str:
    return (
        f"  {row['workload']:<10} {row['backend']:<14} TPOT {row['tpot_ms']:7.3f} ms  "
        f"ratio {row['ratio']:.3f}  accepted {row['accepted']:.2f}"
        f"  over plans {row['prefix_share'] or 0:.1%}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
