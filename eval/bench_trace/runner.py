"""The same window replayed by engines that are up at the same time, in turn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from eval.bench_trace.trace import Window, prompts
from eval.engine_process import EngineProcess


def write_requests(path: Path, window: Window, block: int, vocab_size: int) -> Path:
    """The window as the file that every engine replays."""
    ids = prompts(window.requests, block, vocab_size)
    path.write_text(
        json.dumps(
            [
                {"at": request.at, "ids": tokens, "new_tokens": request.output}
                for request, tokens in zip(window.requests, ids, strict=True)
            ]
        )
    )
    return path


def warm_up(engines: dict[str, EngineProcess], requests: Path) -> None:
    """A whole replay by each engine, not counted: every new prompt length costs ms at first."""
    for engine in engines.values():
        engine.ask("replay", path=str(requests))


def alternate(
    engines: dict[str, EngineProcess], requests: Path, alternations: int
) -> Iterator[tuple[str, int, list[dict]]]:
    """(backend, alternation, its requests as engine_worker times them) of each replay."""
    order = list(engines)
    for i in range(alternations):
        # Every other round backwards, so that no backend always comes after the same one.
        for backend in order if i % 2 == 0 else order[::-1]:
            yield backend, i, engines[backend].ask("replay", path=str(requests))["requests"]
