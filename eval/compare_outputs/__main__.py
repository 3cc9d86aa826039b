"""python -m eval.compare_outputs WHAT: are the outputs of a running engine right?

layers: each backend's engine answers the same requests with the same seeded weights. In a decode
step with all requests running, attention of the first, middle and last layer is dumped (see
dump.py) and judged by full attention in fp64 over the same q and KV: of each request and head, the
error must be that of low-precision torch on the same inputs (as eval.bench_kernel judges). CUDA
graphs and overlap scheduling are on, as in a server.

logprobs: the log-probabilities of the first backend's greedy tokens, in the engines of the other
backends along the same tokens (see teacher.py). Those of a prefix backend may be as far from it as
twice what the stock ones are, on average and in the worst request, and may have chosen other tokens
at near-ties alone (see eval/demo/near_ties.py). Where no other stock backend is named, in float32
on a CPU, as far is 2e-3 nats.

With --model they answer chats with a released checkpoint, and go on with a fixed text, whose
perplexity is printed: smollm2 is SmolLM2-135M-Instruct (downloaded once, 93 MB, Apache-2.0),
gemma3-270m is Gemma 3 270M with its windows (238 MB, under Gemma's own terms of use). On a CPU
torch_native attends to all of a text in layers with windows, in both engines.

Exit status 1: an output is wrong, as one must be under every --fault. 2: the check could not be
made: an engine ended, or the dumped step was not the one to be judged.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from eval import checkpoints, provenance
from eval.cli_values import benchmark, several
from eval.compare_outputs import (
    faults,
    layer_judgement,
    logprobs,
    scenarios,
    seeded_engine,
    subject,
)  # fmt: skip
from eval.engine_process import EngineError, end_on_sigterm, uses_prefix
from eval.model_shapes import LLAMAS
from sgl_prefix_attn.tools.argument_types import count

_JUDGES = {"layers": layer_judgement.judge_engines, "logprobs": logprobs.judge_engines}
_JUDGED = {"layers": "layer outputs", "logprobs": "comparisons"}
# Options of seeded models; a trained one has its own.
_SEEDED = ("--model-shape", "--layers", "--scenarios", "--scale")
_BACKENDS = {"layers": ["prefix", "flashinfer"], "logprobs": ["flashinfer", "fa3", "prefix"]}


def main(argv: list[str]) -> int:
    args = _parse(argv)
    end_on_sigterm()
    seeded = {"model_shape": args.model_shape, "layers": args.layers, "seed": seeded_engine.SEED}
    known = {"model": args.model} if args.model else seeded
    meta = provenance.collect("eval.compare_outputs", argv, **known)
    rows: list[dict] = []
    with tempfile.TemporaryDirectory(prefix=f"compare-{args.what}-") as name:
        folder = Path(name)
        try:
            if args.model:
                compared = subject.trained(checkpoints.CHECKPOINTS[args.model], args.new_tokens)
            else:
                compared = subject.seeded(folder / "model", args)
            for page_size in args.page_size:
                home = folder / f"page-{page_size}"
                for row, text in _JUDGES[args.what](page_size, compared, home, args):
                    rows.append(row)
                    wrong = f"\n    WRONG: {row['problem']}" if row["problem"] else ""
                    print(text + wrong, flush=True)
                    provenance.save(args.json, meta, rows, fault=args.fault)
        except (EngineError, checkpoints.ModelError) as error:
            print(f"no judgement: {error}", file=sys.stderr)
            return 2
    wrong = sum(row["problem"] is not None for row in rows)
    judged = f"{wrong} of {len(rows)} {_JUDGED[args.what]} are wrong"
    print(judged if wrong else "all outputs are right")
    return 1 if wrong else 0


def _parse(argv: list[str]):
    parser = benchmark("eval.compare_outputs", __doc__, LLAMAS, "")
    parser.add_argument("what", choices=list(_JUDGES))
    known = list(checkpoints.CHECKPOINTS)
    parser.add_argument("--model", choices=known, help="a trained one, not a seeded one")
    parser.add_argument("--layers", type=count, default=4)
    parser.add_argument("--scenarios", type=several(scenarios.known), default="shared,three_levels")
    parser.add_argument("--page-size", type=several(count), default="1,16")
    parser.add_argument("--new-tokens", type=count, default=64)
    parser.add_argument("--scale", type=count, default=1, help="divides all prompt lengths")
    parser.add_argument("--fault", choices=list(faults.FAULTS), help="planted in prefix engines")
    args = parser.parse_args(argv)
    args.backends = args.backends or _BACKENDS[args.what]
    stock = [backend for backend in args.backends if not uses_prefix(backend)]
    if args.what == "logprobs":
        if len(args.backends) < 2:
            parser.error("argument --backends: expected two or more")
        if uses_prefix(args.backends[0]):
            parser.error(f"argument --backends: {args.backends[0]} is first, expected a stock one")
        if args.device.type == "cuda" and len(stock) < 2:
            parser.error("argument --backends: expected two stock ones, the yardstick of bf16")
    for option in _SEEDED if args.model else ():
        if any(given.split("=")[0] == option for given in argv):
            parser.error(f"argument {option}: not with --model, which has its own")
    if args.layers < 3:
        parser.error(f"--layers {args.layers}: three layers are judged")
    if args.fault and stock == args.backends:
        parser.error(f"--fault {args.fault}: none of the backends is prefix")
    return args


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
