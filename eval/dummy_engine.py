"""Engines with dummy weights, side by side on one GPU, and the rows that come of them."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from eval import provenance
from eval.engine_process import (
    EngineError,
    EngineProcess,
    backend_arguments,
    backend_env,
    end_on_sigterm,
    folder_name,
    names_prefix,
)

Run = Callable[[Path, list[dict]], Iterator[dict]]


def engine_arguments(
    model: Path, *, device: torch.device, page_size: int, pool_tokens: int,
    decode_batches: list[int],
) -> dict:  # fmt: skip
    """Return sglang.Engine's arguments; `decode_batches` are the captured sizes, their largest the
    limit of running requests."""
    arguments = {
        "model_path": str(model), "load_format": "dummy", "skip_tokenizer_init": True,
        "page_size": page_size, "max_total_tokens": pool_tokens // 64 * 64,
        "max_running_requests": max(decode_batches), "grammar_backend": "none",
        "sampling_backend": "pytorch", "random_seed": 1, "log_level": "warning",
    }  # fmt: skip
    if device.type == "cpu":
        return arguments | {"device": "cpu", "dtype": "float32", "skip_server_warmup": True}
    return arguments | {
        # max_total_tokens sets the pool; this only has to leave it room beside other engines.
        "mem_fraction_static": 0.95,
        "cuda_graph_bs_decode": decode_batches,
    }


@contextlib.contextmanager
def side_by_side(
    backends: Iterable[str], folder: Path, arguments: dict, *,
    more: Callable[[str, Path], dict] = lambda backend, home: {},
) -> Iterator[dict[str, EngineProcess]]:  # fmt: skip
    """Run an engine of each backend at the same time.

    folder  a new one of each is made in it, its home
    more    of a backend and its home: plugin and env of EngineProcess, and more `arguments`

    Raises EngineError.
    """
    with contextlib.ExitStack() as stack:
        engines = {}
        for backend in backends:
            home = folder / folder_name(backend)
            own = more(backend, home)
            print(f"starting {backend}", flush=True)
            engine = EngineProcess(
                arguments | backend_arguments(backend) | own.get("arguments", {}), home,
                product=names_prefix(backend), plugin=own.get("plugin"),
                env=backend_env(backend) | own.get("env", {}),
            )  # fmt: skip
            engines[backend] = stack.push(engine)
        for backend, engine in engines.items():
            engine.wait_until_up()
            print(f"{backend} is up after {engine.start_s} s", flush=True)
        yield engines


def run_all(
    module: str, argv: list[str], args, runs: Iterable[Run],
    text: Callable[[dict], str], **facts,
) -> int:  # fmt: skip
    """Print the rows of a benchmark as they come and save all.

    runs   each makes rows of a new folder and the rows so far
    text   of a row
    facts  more of the result file's meta

    Returns the exit status: 1 if an engine failed before all rows of a run had come, which is told.
    """
    end_on_sigterm()
    meta = provenance.collect(module, argv, model_shape=args.model_shape, **facts)
    rows: list[dict] = []
    status = 0
    for run in runs:
        try:
            with tempfile.TemporaryDirectory(prefix="bench-") as folder:
                for row in run(Path(folder), rows):
                    rows.append(row)
                    print(text(row), flush=True)
                    provenance.save(args.json, meta, rows)
        except EngineError as error:
            print(f"stopped after {len(rows)} rows: {error}", file=sys.stderr)
            status = 1
    return status


def in_turn(names: Iterable[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Yield (round, name); every other round backwards, so that none always follows the same."""
    order = list(names)
    for i in range(rounds):
        yield from ((i, name) for name in order[:: (-1) ** i])
