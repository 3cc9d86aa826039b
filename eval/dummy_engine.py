"""Engines with dummy weights, side by side on one GPU: what bench_engine and bench_trace share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from eval.engine_process import EngineProcess, backend_arguments, backend_env, names_prefix


def engine_arguments(
    model: Path,
    *,
    device: torch.device,
    page_size: int,
    pool_tokens: int,
    decode_batches: list[int],
) -> dict:
    """Return sglang.Engine's arguments; `decode_batches` are the captured sizes, their largest the
    limit of running requests."""
    arguments = {
        "model_path": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "page_size": page_size,
        "max_total_tokens": pool_tokens // 64 * 64,
        "max_running_requests": max(decode_batches),
        "grammar_backend": "none",
        "sampling_backend": "pytorch",
        "random_seed": 1,
        "log_level": "warning",
    }
    if device.type == "cpu":
        return arguments | {"device": "cpu", "dtype": "float32", "skip_server_warmup": True}
    return arguments | {
        # max_total_tokens sets the pool; this only has to leave it room beside other engines.
        "mem_fraction_static": 0.95,
        "cuda_graph_bs_decode": decode_batches,
    }


def start(
    stack: contextlib.ExitStack,
    backend: str,
    home: Path,
    arguments: dict,
    *,
    plugin: str | None = None,
    env: dict[str, str] | None = None,
) -> EngineProcess:
    """Begin to start an engine of a backend, ended by `stack`; plugin and env are EngineProcess's.
    It answers after wait_until_up."""
    print(f"starting {backend}", flush=True)
    arguments = arguments | backend_arguments(backend)
    env = backend_env(backend) | (env or {})
    product = names_prefix(backend)
    engine = EngineProcess(arguments, home, product=product, plugin=plugin, env=env)
    stack.push(engine)
    return engine


def wait_until_up(engines: Mapping[str, EngineProcess]) -> None:
    """Wait for engines by backend, which start at the same time. Raises EngineError."""
    for backend, engine in engines.items():
        engine.wait_until_up()
        print(f"{backend} is up after {engine.start_s} s", flush=True)


def in_turn(names: Iterable[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Yield (round, name); every other round backwards, so that none always follows the same."""
    order = list(names)
    for i in range(rounds):
        yield from ((i, name) for name in order[:: (-1) ** i])
