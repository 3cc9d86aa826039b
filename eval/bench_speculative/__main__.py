"""python -m eval.bench_speculative: TPOT where a target model verifies chains of an EAGLE draft.

Target and draft have random weights, the draft one layer of the target's shape, and SGLang itself
accepts as many tokens as it is told to (SGLANG_SIMULATE_ACC_LEN), for every backend alike. Engines
stand side by side on one GPU and take turns; the ratio is that of the medians.

Expected of --speculative 4:3 on an H200, 64 requests of 8192 + 256 tokens, before any run. A step,
in milliseconds: the target's matrices over 256 rows 6.7 (3.8 TFLOP at 650 TFLOP/s and small
kernels; its 15 GB alone would take 3.5), 32 layers of verification 9.1 stock and 3.1 over a plan
(285 and 97 us a layer in multi_token_h200.json), the draft's three passes 2.0 for either (0.8 of it
stock attention, the rest its layer and the vocabulary), sampling and launches 0.5. So 18.3 and 12.3
for three tokens, TPOT 6.1 and 4.1, ratio 0.67; more than 0.75 would be a disappointment. SGLang's
FlashInfer verifies with a mask of its own, which that file's did not: stock may well be slower.

Since then two of the draft's three passes go over a plan, too. Expected of that before any run:
0.05 ms of attention a pass where there were 0.27, so 0.4 ms a step less, 0.15 ms a token. The host
makes a second plan each step, which an engine that waits for the host would pay for.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path

from eval import provenance
from eval.bench_engine.decode_times import alternate, each_tpot_ms, tpot_ms
from eval.bench_engine.workloads import Workload, parse_workloads
from eval.bench_speculative import verify_steps
from eval.cli_values import device, output, several
from eval.dummy_engine import engine_arguments, start, wait_until_up
from eval.engine_process import EngineError, end_on_sigterm, folder_name, uses_prefix
from eval.model_shapes import LLAMAS, SHAPES, write_config
from sgl_prefix_attn.cli.argument_types import count

# KV pool over what the workload needs: outputs of earlier generations, slots of drafts ahead.
_POOL_MARGIN = 1.4


def main(argv: list[str]) -> int:
    args, workload = _parse(argv)
    end_on_sigterm()
    meta = provenance.collect("eval.bench_speculative", argv, model_shape=args.model_shape)
    with tempfile.TemporaryDirectory(prefix="bench-spec-") as folder, contextlib.ExitStack() as s:
        try:
            rows = _run(Path(folder), s, args, workload)
        except EngineError as error:
            print(error, file=sys.stderr)
            return 1
    if args.json:
        provenance.save(args.json, meta, rows)
    return 0


def _run(folder: Path, stack: contextlib.ExitStack, args, workload: Workload) -> list[dict]:
    tokens, accepted = args.speculative
    backends = list(dict.fromkeys(args.backends.split(",")))
    arguments = engine_arguments(
        write_config(folder / "model", args.model_shape),
        device=args.device,
        page_size=1,
        pool_tokens=int(_POOL_MARGIN * workload.kv_tokens(args.new_tokens[1])) + 1024,
        decode_batches=[workload.batch],
    ) | draft_arguments(folder / "draft", args.model_shape, tokens)
    engines, counts = {}, {}
    for backend in backends:
        home = folder / folder_name(backend)
        counts[backend] = home / "verify.json"
        env = {"SGLANG_SIMULATE_ACC_LEN": str(accepted), verify_steps.ENV: str(counts[backend])}
        attention, _, drafts = backend.partition("+")
        plugin = verify_steps.__name__ if uses_prefix(attention) else None
        own = arguments | verifying_arguments(attention)
        if drafts:
            own["speculative_draft_attention_backend"] = drafts
        engines[backend] = start(stack, attention, home, own, plugin=plugin, env=env)
    wait_until_up(engines)
    vocab_size = SHAPES[args.model_shape]["vocab_size"]
    samples = alternate(
        engines, workload, vocab_size, args.new_tokens, args.alternations, lambda text: print(text)
    )
    rows: list[dict] = []
    for backend, engine in engines.items():
        prompts = workload.prompts(vocab_size)
        answer = engine.ask("time_batch", ids=prompts, new_tokens=args.new_tokens[1])
        if abs(answer["accepted"] - accepted) > 0.1:
            raise EngineError(f"{backend} accepts {answer['accepted']:.2f} tokens, not {accepted}")
        tpot = tpot_ms(samples[backend], args.new_tokens)
        steps = verify_steps.read(counts[backend], tokens)
        rounds = verify_steps.read(counts[backend], verify_steps.DRAFTS)
        rows.append(
            {
                "backend": backend, "workload": workload.name, "page_size": 1,
                "batch": workload.batch, "shared": workload.shared, "private": workload.private,
                "draft_tokens": tokens, "accepted": answer["accepted"], "tpot_ms": tpot,
                "ratio": tpot / (rows[0]["tpot_ms"] if rows else tpot),
                "each_tpot_ms": each_tpot_ms(samples[backend], args.new_tokens),
                "verify_steps": steps, "prefix_share": verify_steps.prefix_share(steps),
                "draft_rounds": rounds, "draft_prefix_share": verify_steps.prefix_share(rounds),
                "seconds_short": samples[backend].short, "seconds_long": samples[backend].long,
                "plugins": engine.plugins,
            }
        )  # fmt: skip
        print(_text(rows[-1]), flush=True)
    return rows


def draft_arguments(folder: Path, shape: str, tokens: int) -> dict:
    """Write the config of an EAGLE draft and return the engine's arguments of chains."""
    eagle = {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}
    return {
        "speculative_algorithm": "EAGLE",
        "speculative_draft_model_path": str(write_config(folder, shape, **eagle)),
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
        f"  over plans {row['prefix_share'] or 0:.1%}, drafts {row['draft_prefix_share'] or 0:.1%}"
    )


def _parse(argv: list[str]):
    parser = argparse.ArgumentParser(prog="python -m eval.bench_speculative", description=__doc__)
    parser.add_argument("--model-shape", default="llama3.1-8b", choices=LLAMAS)
    parser.add_argument(
        "--backends",
        default="flashinfer,prefix/prefix",
        help="first: baseline; such as fa3,fa3/prefix; BACKEND+DRAFTS: drafts by another",
    )
    parser.add_argument("--workload", default="shared8k", help="a name, or 64x8192+256")
    parser.add_argument("--speculative", type=speculative, default="4:3", help="DRAFTED:ACCEPTED")
    parser.add_argument("--alternations", type=count, default=3)
    parser.add_argument(
        "--new-tokens", type=several(count), default="48,240", help="short and long generation"
    )
    parser.add_argument("--device", type=device, default="cuda")
    parser.add_argument("--json", type=output, metavar="OUT")
    args = parser.parse_args(argv)
    try:
        (workload,) = parse_workloads(args.workload)
    except ValueError as error:
        parser.error(f"argument --workload: {error}")
    if len(args.new_tokens) != 2 or args.new_tokens[0] >= args.new_tokens[1]:
        parser.error("argument --new-tokens: expected SHORT,LONG")
    return args, workload


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
