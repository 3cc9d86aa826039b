"""The same window replayed by engines that are up at the same time, in turn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import orjson

from eval.bench_trace.trace import Window, prompts
from eval.dummy_engine import in_turn
from eval.engine_process import EngineProcess


def write_requests(path: Path, window: Window, block: int, vocab_size: int) -> Path:
    """Write the window as the file that every engine replays."""
    ids = prompts(window.requests, block, vocab_size)
    requests = [
        {"at": request.at, "ids": tokens, "new_tokens": request.output}
        for request, tokens in zip(window.requests, ids, strict=True)
    ]
    path.write_bytes(orjson.dumps(requests))
    return path


def warm_up(engines: dict[str, EngineProcess], requests: Path) -> None:
    """Replay once by each engine, not counted: every new prompt length costs ms at first."""
    for engine in engines.values():
        engine.ask("replay", path=str(requests))


def alternate(
    engines: dict[str, EngineProcess], requests: Path, alternations: int
) -> Iterator[tuple[str, int, list[dict]]]:
    """Yield (backend, alternation, its requests as engine_worker times them) of each replay."""
    for i, backend in in_turn(engines, alternations):
        yield backend, i, engines[backend].ask("replay", path=str(requests))["requests"]
