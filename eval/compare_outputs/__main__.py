"""python -m eval.compare_outputs WHAT: are the outputs of a running engine right?

layers: each backend's engine answers the same requests with the same seeded weights. In a decode
step with all requests running, attention of the first, middle and last layer is dumped (see
dump.py) and judged by full attention in fp64 over the same q and KV: its error, overall and of the
worst (request, head), must be that of low-precision torch on the same inputs (as eval.bench_kernel
judges). CUDA graphs and overlap scheduling are on, as in a server, unless --disable-cuda-graph.

logprobs: the log-probabilities of the first backend's greedy tokens, in the engines of the other
backends along the same tokens (see teacher.py). Those of a prefix backend may be as far from it as
twice what the stock ones are, on average and in the worst request.

gsm8k: with --model-path of a real checkpoint, SGLang's own sglang.test.few_shot_gsm8k on a server
of each backend; all accuracies must be the first one's within three standard errors.

Exit status 1: an output is wrong, as one must be under every --fault. 2: the check could not be
made: an engine ended, or the dumped step was not the one to be judged.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from eval import provenance
from eval.cli_values import device, output, several
from eval.compare_outputs import dump, faults, gsm8k, logprobs, scenarios, seeded_engine
from eval.compare_outputs.dump import LayerDump
from eval.compare_outputs.layer_judgement import judge, not_the_step, three_layers
from eval.engine_process import (
    EngineError,
    end_on_sigterm,
    folder_name,
    uses_prefix,
)
from eval.model_shapes import LLAMAS
from sgl_prefix_attn.cli.argument_types import count

_JUDGED = {"layers": "layer outputs", "logprobs": "comparisons", "gsm8k": "accuracies"}
_BACKENDS = {
    "layers": "prefix,flashinfer",
    "logprobs": "flashinfer,fa3,prefix",
    "gsm8k": "flashinfer,prefix",
}


def main(argv: list[str]) -> int:
    args = _parse(argv)
    if args.what == "gsm8k" and args.model_path is None:
        print("gsm8k was not run: it needs --model-path of a real checkpoint", file=sys.stderr)
        return 2
    end_on_sigterm()
    model = {
        "seed": seeded_engine.SEED,
        "model_shape": args.model_shape,
        "layers": args.layers,
    }
    if args.what == "gsm8k":
        model = {"model": args.model_path.name}
    meta = provenance.collect("eval.compare_outputs", argv, **model)
    with tempfile.TemporaryDirectory(prefix=f"compare-{args.what}-") as folder:
        try:
            rows = _rows(Path(folder), args)
        except EngineError as error:
            print(f"no judgement: {error}", file=sys.stderr)
            return 2
    if args.json:
        provenance.save(args.json, meta, rows, fault=args.fault)
    wrong = sum(row["problem"] is not None for row in rows)
    judged = f"{wrong} of {len(rows)} {_JUDGED[args.what]} are wrong"
    print(judged if wrong else "all outputs are right")
    return 1 if wrong else 0


def _rows(folder: Path, args) -> list[dict]:
    if args.what == "gsm8k":
        return gsm8k.judge_servers(folder, args)
    model = seeded_engine.write_model(folder / "model", args.model_shape, args.layers)
    rows: list[dict] = []
    for page_size in args.page_size:
        home = folder / f"page-{page_size}"
        if args.what == "logprobs":
            rows += logprobs.judge_engines(page_size, model, home, args)
            continue
        for backend in args.backends:
            rows += _judge_engine(backend, page_size, model, home / folder_name(backend), args)
    return rows


def _judge_engine(backend: str, page_size: int, model: Path, home: Path, args) -> list[dict]:
    """Return the rows of one engine: every scenario, every layer."""
    layers = three_layers(args.layers)
    folder = home / "dumps"
    env = dump.configure(folder, layers, seeded_engine.MAX_RUNNING_REQUESTS)
    vocab = seeded_engine.vocab(args.model_shape)
    with seeded_engine.judged(backend, page_size, model, home, args, dump, env) as engine:
        for name in args.scenarios:
            requests = scenarios.build(name, vocab, args.new_tokens, args.scale)
            dump.order(folder, name, len(requests))
            engine.ask("generate", requests=requests)
            if dump.is_open(folder):
                raise EngineError(
                    f"{backend}, {name}: its {len(requests)} requests never ran together for "
                    f"{dump.STEP} steps; more --new-tokens may help"
                )
    rows = []
    for name in args.scenarios:
        for layer in layers:
            rows.append(_row(dump.load(folder, name, layer), backend, page_size, name, layer, args))
            print(_text(rows[-1]), flush=True)
    return rows


def _row(dumped: LayerDump, backend: str, page_size: int, name: str, layer: int, args) -> dict:
    """Judge one layer. Raises EngineError when the dumped step was not the one to be judged."""
    problem = not_the_step(dumped, backend, args.graphs)
    if problem is not None:
        raise EngineError(f"{backend}, {name}: the dumped step {problem}")
    error, error_torch, problem = judge(dumped, args.device)
    return {
        "backend": backend,
        "page_size": page_size,
        "scenario": name,
        "layer": layer,
        "requests": len(dumped.q),
        "kv_tokens": int(dumped.seq_lens.sum()),
        "kv_slots": len(dumped.k),
        "cuda_graph": dumped.replayed,
        "decision": dumped.decision,
        "error": asdict(error),
        "error_torch": asdict(error_torch),
        "problem": problem,
    }


def _text(row: dict) -> str:
    error, torch_error = row["error"], row["error_torch"]
    ran = "replayed" if row["cuda_graph"] else "eager"
    text = (
        f"  {row['scenario']}, layer {row['layer']} ({row['requests']} requests, {ran}): error "
        f"{error['norm']:.2e} (torch {torch_error['norm']:.2e}), worst row "
        f"{error['worst_row']:.2e} (torch {torch_error['worst_row']:.2e})"
    )
    return f"{text}\n    WRONG: {row['problem']}" if row["problem"] else text


def _parse(argv: list[str]):
    parser = argparse.ArgumentParser(prog="python -m eval.compare_outputs", description=__doc__)
    parser.add_argument("what", choices=list(_JUDGED))
    parser.add_argument(
        "--backends",
        help="each a name or PREFILL/DECODE; prefix:KERNELS forces its kernels; others are "
        "compared with the first, but for layers",
    )
    parser.add_argument("--disable-cuda-graph", action="store_true")
    parser.add_argument("--model-shape", default="llama3.1-8b", choices=LLAMAS)
    parser.add_argument("--layers", type=count, default=4)
    parser.add_argument("--scenarios", default="shared,three_levels")
    parser.add_argument("--page-size", type=several(count), default="1,16")
    parser.add_argument("--new-tokens", type=count, default=64)
    parser.add_argument("--scale", type=count, default=1, help="divides all prompt lengths")
    parser.add_argument("--fault", choices=list(faults.FAULTS), help="planted in prefix engines")
    parser.add_argument("--model-path", type=Path, help="gsm8k: a real checkpoint")
    parser.add_argument("--data-path", type=Path, help="gsm8k: its test.jsonl, else downloaded")
    parser.add_argument("--questions", type=count, default=200, help="gsm8k")
    parser.add_argument("--device", type=device, default="cuda")
    parser.add_argument("--json", type=output, metavar="OUT")
    args = parser.parse_args(argv)
    args.scenarios = args.scenarios.split(",")
    args.backends = (args.backends or _BACKENDS[args.what]).split(",")
    args.graphs = args.device.type == "cuda" and not args.disable_cuda_graph
    unknown = [name for name in args.scenarios if name not in scenarios.SCENARIOS]
    if unknown:
        parser.error(f"scenario {unknown[0]!r}: known are {', '.join(scenarios.SCENARIOS)}")
    if args.what != "layers" and (len(set(args.backends)) < max(2, len(args.backends))):
        parser.error("argument --backends: expected two or more, each once")
    if args.what == "logprobs" and uses_prefix(args.backends[0]):
        parser.error(f"argument --backends: {args.backends[0]} is first, expected a stock one")
    stock = [backend for backend in args.backends if not uses_prefix(backend)]
    if args.what == "logprobs" and args.device.type == "cuda" and len(stock) < 2:
        parser.error("argument --backends: expected two stock ones, the yardstick of bf16")
    if args.layers < 3:
        parser.error(f"--layers {args.layers}: three layers are judged")
    if args.fault and not any(uses_prefix(backend) for backend in args.backends):
        parser.error(f"--fault {args.fault}: none of the backends is prefix")
    return args


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
