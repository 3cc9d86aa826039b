"""python -m eval.compare_outputs layers: is the attention of a running engine right?

Each backend's engine answers the same requests with the same seeded weights. In a decode step with
all requests running, attention of the first, middle and last layer is dumped (see dump.py) and
judged by full attention in fp64 over the same q and KV: its error, overall and of the worst
(request, head), must be that of low-precision torch on the same inputs (as eval.bench_kernel
judges). CUDA graphs and overlap scheduling are on, as in a server, unless --disable-cuda-graph.

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
from eval.cli_values import device, several
from eval.compare_outputs import dump, faults, scenarios, seeded_engine
from eval.compare_outputs.dump import LayerDump
from eval.compare_outputs.layer_judgement import judge, not_the_step, three_layers
from eval.engine_process import (
    EngineError,
    EngineProcess,
    backend_arguments,
    backend_env,
    end_on_sigterm,
    folder_name,
    uses_prefix,
)
from eval.model_shapes import SHAPES
from sgl_prefix_attn.cli.argument_types import count


def main(argv: list[str]) -> int:
    args = _parse(argv)
    end_on_sigterm()
    meta = provenance.collect(
        "eval.compare_outputs",
        argv,
        seed=seeded_engine.SEED,
        model_shape=args.model_shape,
        layers=args.layers,
    )
    rows: list[dict] = []
    with tempfile.TemporaryDirectory(prefix="compare-layers-") as folder:
        try:
            model = seeded_engine.write_model(Path(folder) / "model", args.model_shape, args.layers)
            for page_size in args.page_size:
                for backend in args.backends:
                    home = Path(folder) / f"page-{page_size}" / folder_name(backend)
                    rows += _judge_engine(backend, page_size, model, home, args)
        except EngineError as error:
            print(f"no judgement: {error}", file=sys.stderr)
            return 2
    if args.json:
        provenance.save(args.json, meta, rows, fault=args.fault)
    wrong = sum(row["problem"] is not None for row in rows)
    print(f"{wrong} of {len(rows)} layer outputs are wrong" if wrong else "all outputs are right")
    return 1 if wrong else 0


def _judge_engine(backend: str, page_size: int, model: Path, home: Path, args) -> list[dict]:
    """Return the rows of one engine: every scenario, every layer."""
    layers = three_layers(args.layers)
    folder, fault_log = home / "dumps", home / "fault.log"
    env = dump.configure(folder, layers, seeded_engine.MAX_RUNNING_REQUESTS)
    if uses_prefix(backend):
        # Prefix kernels in every step that can run them: they are judged here, not the policy.
        env |= {"SGL_PREFIX_ATTN_POLICY": "prefix"} | backend_env(backend)
    fault = args.fault if uses_prefix(backend) else None
    if fault:
        env |= {faults.FAULT_ENV: fault, faults.LOG_ENV: str(fault_log)}
    arguments = seeded_engine.engine_arguments(model, args.device, page_size)
    arguments |= backend_arguments(backend)
    if not args.graphs:
        arguments["disable_cuda_graph"] = True
    vocab = seeded_engine.vocab(args.model_shape)
    with EngineProcess(arguments, home / "engine", plugin=dump.__name__, env=env) as engine:
        planted = f" with {fault} planted" if fault else ""
        print(f"{backend}{planted}, page size {page_size}: up after {engine.start_s} s", flush=True)
        for name in args.scenarios:
            requests = scenarios.build(name, vocab, args.new_tokens, args.scale)
            dump.order(folder, name, len(requests))
            engine.ask("generate", requests=requests)
            if dump.is_open(folder):
                raise EngineError(
                    f"{backend}, {name}: its {len(requests)} requests never ran together for "
                    f"{dump.STEP} steps; more --new-tokens may help"
                )
    if fault and not faults.times_planted(fault_log):
        raise EngineError(f"the fault {fault} was never planted")
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
    parser.add_argument("what", choices=["layers"], help="the attention of three layers")
    parser.add_argument(
        "--backends",
        default="prefix,flashinfer",
        help="each a name or PREFILL/DECODE; prefix:KERNELS forces its kernels",
    )
    parser.add_argument("--disable-cuda-graph", action="store_true")
    parser.add_argument("--model-shape", default="llama3.1-8b", choices=list(SHAPES))
    parser.add_argument("--layers", type=count, default=4)
    parser.add_argument("--scenarios", default="shared,three_levels")
    parser.add_argument("--page-size", type=several(count), default="1,16")
    parser.add_argument("--new-tokens", type=count, default=64)
    parser.add_argument("--scale", type=count, default=1, help="divides all prompt lengths")
    parser.add_argument("--fault", choices=list(faults.FAULTS), help="planted in prefix engines")
    parser.add_argument("--device", type=device, default="cuda")
    parser.add_argument("--json", metavar="OUT")
    args = parser.parse_args(argv)
    args.scenarios, args.backends = args.scenarios.split(","), args.backends.split(",")
    args.graphs = args.device.type == "cuda" and not args.disable_cuda_graph
    unknown = [name for name in args.scenarios if name not in scenarios.SCENARIOS]
    if unknown:
        parser.error(f"scenario {unknown[0]!r}: known are {', '.join(scenarios.SCENARIOS)}")
    if args.layers < 3:
        parser.error(f"--layers {args.layers}: three layers are judged")
    if args.fault and not any(uses_prefix(backend) for backend in args.backends):
        parser.error(f"--fault {args.fault}: none of the backends is prefix")
    return args


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
