"""Dumped layers of engines, judged by full attention over the same q and KV."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from eval.bench_kernel.oracle import Error, Judgement, attend_rows
from eval.compare_outputs import dump, seeded_engine
from eval.compare_outputs.dump import LayerDump
from eval.compare_outputs.subject import Subject
from eval.engine_process import EngineError, folder_name, uses_prefix


def judge_engines(page_size: int, subject: Subject, home: Path, args) -> Iterator[tuple[dict, str]]:
    """Yield the row and its text of every backend, scenario and layer. Raises EngineError."""
    layers = three_layers(subject.layers)
    for backend in args.backends:
        folder = home / folder_name(backend)
        dumps = folder / "dumps"
        env = dump.configure(dumps, layers, seeded_engine.MAX_RUNNING_REQUESTS)
        judged = seeded_engine.judged(backend, page_size, subject.model, folder, args, dump, env)
        with judged as engine:
            for name, requests in subject.requests.items():
                dump.order(dumps, name, len(requests))
                engine.ask("generate", requests=requests)
                if dump.is_open(dumps):
                    raise EngineError(
                        f"{backend}, {name}: its {len(requests)} requests never ran together for "
                        f"{dump.STEP} steps; a larger --scale or more --new-tokens may help"
                    )
        for name in subject.requests:
            for layer in layers:
                known = {"backend": backend, "page_size": page_size, "scenario": name}
                row = known | {"layer": layer} | _row(dump.load(dumps, name, layer), known, args)
                yield row, _text(row)


def _row(dumped: LayerDump, known: dict, args) -> dict:
    """Judge one layer. Raises EngineError when the dumped step was not the one to be judged."""
    problem = not_the_step(dumped, known["backend"], graphs=args.device.type == "cuda")
    if problem is not None:
        raise EngineError(f"{known['backend']}, {known['scenario']}: the dumped step {problem}")
    error, error_torch, problem = judge(dumped, args.device)
    return {
        "requests": len(dumped.q), "kv_tokens": int(dumped.seq_lens.sum()),
        "kv_slots": len(dumped.k), "cuda_graph": dumped.replayed, "decision": dumped.decision,
        "error": asdict(error), "error_torch": asdict(error_torch), "problem": problem,
    }  # fmt: skip


def _text(row: dict) -> str:
    error, torch_error = row["error"], row["error_torch"]
    ran = "replayed" if row["cuda_graph"] else "eager"
    return (
        f"  {row['scenario']}, layer {row['layer']} ({row['requests']} requests, {ran}): error "
        f"{error['norm']:.2e} (torch {torch_error['norm']:.2e}), worst row "
        f"{error['worst_row']:.2e} (torch {torch_error['worst_row']:.2e})"
    )


def judge(layer: LayerDump, device: torch.device | str = "cpu") -> tuple[Error, Error, str | None]:
    """Return errors of the output and of low-precision torch, and why the output is wrong."""
    exact = torch.float64
    judgement = Judgement(
        _attend(layer, exact, exact, device), _attend(layer, torch.float32, layer.q.dtype, device)
    )
    out = layer.out.to(device)
    return judgement.error(out), judgement.error_torch, judgement.problem(out)


def not_the_step(layer: LayerDump, backend: str, graphs: bool) -> str | None:
    """Say why a dumped step tells nothing about `backend`, or return None."""
    if uses_prefix(backend) and (layer.decision is None or layer.decision[0] != "prefix"):
        return f"ran without the prefix kernels (decision {layer.decision})"
    if graphs and not layer.replayed:
        return "ran eagerly although CUDA graphs are on"
    return None


def three_layers(count: int) -> list[int]:
    """Return the first, middle and last of `count` layers."""
    return [0, count // 2, count - 1]


def _attend(
    layer: LayerDump, score_dtype: torch.dtype, dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """Attend request by request, because their lengths differ; [B, Hq, D] in `dtype`."""
    q, k, v, index = (x.to(device) for x in (layer.q, layer.k, layer.v, layer.index))
    return torch.cat(
        [
            attend_rows(
                q[i : i + 1], k, v, index[i : i + 1, :length], layer.sm_scale, score_dtype, dtype
            )
            for i, length in enumerate(layer.seq_lens.tolist())
        ]
    )
