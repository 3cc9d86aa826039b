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

import torch

from eval import provenance
from eval.bench_kernel.oracle import Error, Judgement, attend_rows
from eval.compare_outputs import dump, engines, faults
from eval.compare_outputs.dump import LayerDump
from eval.engine_process import (
    EngineError,
    EngineProcess,
    backend_arguments,
    end_on_sigterm,
    uses_prefix,
)


def main(argv: list[str]) -> int:
    args = _parse(argv)
    end_on_sigterm()
    meta = engines.meta(["layers", *argv], args)
    rows: list[dict] = []
    with tempfile.TemporaryDirectory(prefix="compare-layers-") as folder:
        try:
            model = engines.write_model(Path(folder) / "model", args)
            for page_size in args.page_size:
                for backend in args.backends:
                    home = Path(folder) / f"page-{page_size}" / backend.replace("/", "-")
                    rows += _judge_engine(backend, page_size, model, home, args)
        except EngineError as error:
            print(f"no judgement: {error}", file=sys.stderr)
            return 2
    if args.json:
        provenance.save(args.json, meta, rows, fault=args.fault)
    wrong = sum(row["problem"] is not None for row in rows)
    print(f"{wrong} of {len(rows)} layer outputs are wrong" if wrong else "all outputs are right")
    return 1 if wrong else 0


def judge(layer: LayerDump, device: str = "cpu") -> tuple[Error, Error, str | None]:
    """Errors of a dumped output and of low-precision torch, and why the output is wrong."""
    exact = torch.float64
    judgement = Judgement(
        _attend(layer, exact, exact, device), _attend(layer, torch.float32, layer.q.dtype, device)
    )
    error = judgement.error(layer.out.to(device))
    return error, judgement.error_torch, judgement.problem(error)


def not_the_step(layer: LayerDump, backend: str, graphs: bool) -> str | None:
    """Why a dumped step says nothing about `backend`, or None."""
    if uses_prefix(backend) and (layer.decision is None or layer.decision[0] != "prefix"):
        return f"ran without the prefix kernels (decision {layer.decision})"
    if graphs and not layer.replayed:
        return "ran eagerly although CUDA graphs are on"
    return None


def three_layers(count: int) -> list[int]:
    """First, middle and last of `count` layers."""
    return [0, count // 2, count - 1]


def _attend(
    layer: LayerDump, score_dtype: torch.dtype, dtype: torch.dtype, device: str
) -> torch.Tensor:
    """Request by request, because their lengths differ; [B, Hq, D] in `dtype`."""
    q, k, v, index = (x.to(device) for x in (layer.q, layer.k, layer.v, layer.index))
    return torch.cat(
        [
            attend_rows(
                q[i : i + 1], k, v, index[i : i + 1, :length], layer.sm_scale, score_dtype, dtype
            )
            for i, length in enumerate(layer.seq_lens.tolist())
        ]
    )


def _judge_engine(backend: str, page_size: int, model: Path, home: Path, args) -> list[dict]:
    """Rows of one engine: every scenario, every layer."""
    layers = three_layers(args.layers)
    folder, fault_log = home / "dumps", home / "fault.log"
    env = engines.environment(backend)
    env |= dump.configure(folder, layers, engines.MAX_RUNNING_REQUESTS)
    fault = args.fault if uses_prefix(backend) else None
    if fault:
        env |= {faults.FAULT_ENV: fault, faults.LOG_ENV: str(fault_log)}
    arguments = engines.engine_arguments(args, model, page_size) | backend_arguments(backend)
    if not args.graphs:
        arguments["disable_cuda_graph"] = True
    scenarios = engines.build_requests(args)
    with EngineProcess(arguments, home / "engine", plugin=dump.__name__, env=env) as engine:
        planted = f" with {fault} planted" if fault else ""
        print(f"{backend}{planted}, page size {page_size}: up after {engine.start_s} s", flush=True)
        for name, requests in scenarios.items():
            dump.order(folder, name, len(requests))
            engine.ask("outputs", requests=requests)
            if dump.is_open(folder):
                raise EngineError(
                    f"{backend}, {name}: its {len(requests)} requests never ran together for "
                    f"{dump.STEP} steps; more --new-tokens may help"
                )
    if fault and not faults.times_planted(fault_log):
        raise EngineError(f"the fault {fault} was never planted")
    rows = []
    for name in scenarios:
        for layer in layers:
            rows.append(_row(dump.load(folder, name, layer), backend, page_size, name, layer, args))
            print(_text(rows[-1]), flush=True)
    return rows


def _row(dumped: LayerDump, backend: str, page_size: int, name: str, layer: int, args) -> dict:
    """Raises EngineError when the dumped step was not the one to be judged."""
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
    parser = argparse.ArgumentParser(
        prog="python -m eval.compare_outputs layers", description=__doc__
    )
    parser.add_argument(
        "--backends", default="prefix,flashinfer", help="each a name or PREFILL/DECODE"
    )
    parser.add_argument("--disable-cuda-graph", action="store_true")
    engines.add_arguments(parser, ["shared", "three_levels"])
    args = engines.parse(parser, argv)
    args.backends = args.backends.split(",")
    args.graphs = args.device == "cuda" and not args.disable_cuda_graph
    if args.layers < 3:
        parser.error(f"--layers {args.layers}: three layers are judged")
    if args.fault and not any(uses_prefix(backend) for backend in args.backends):
        parser.error(f"--fault {args.fault}: none of the backends is prefix")
    return args
