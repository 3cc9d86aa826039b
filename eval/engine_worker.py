"""Child process with one SGLang engine; see engine_process.py, which starts it.

    python -m eval.engine_worker CONFIG.json

Reads one JSON command per line from stdin and answers each with one marked JSON line on stdout.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path

MARK = "@@eval@@"
_IDLE_S = 60.0  # a flush waits so long for the scheduler to notice that nothing runs


def main(path: str) -> None:
    import sglang

    start = time.perf_counter()
    engine = sglang.Engine(**json.loads(Path(path).read_text()))
    _answer(
        {
            "start_s": round(time.perf_counter() - start, 1),
            "plugins": loaded_plugins(),
        }
    )
    for line in sys.stdin:
        command = json.loads(line)
        try:
            _answer(_OPS[command.pop("op")](engine, **command))
        except Exception as error:  # the parent decides what a failed request means
            _answer({"error": f"{type(error).__name__}: {error}"})
    engine.shutdown()


def loaded_plugins() -> list[str]:
    """Return names of the SGLang plugins whose module this process imported."""
    points = entry_points(group="sglang.srt.plugins")
    return sorted({point.name for point in points if point.module in sys.modules})


def _time_batch(engine, ids: list[list[int]], new_tokens: int) -> dict:
    """Time a greedy batch that arrives at once, in seconds; accepted: tokens a step and request,
    None where nothing is drafted."""
    sampling = {"max_new_tokens": new_tokens, "ignore_eos": True, "temperature": 0}
    start = time.perf_counter()
    answers = engine.generate(input_ids=ids, sampling_params=sampling)
    seconds = time.perf_counter() - start
    accepted = [answer["meta_info"].get("spec_accept_length") for answer in answers]
    return {"seconds": seconds, "accepted": None if None in accepted else statistics.mean(accepted)}


def _generate(engine, requests: list[dict]) -> dict:
    """Answer greedy requests with ids, new_tokens and maybe an id; nothing is returned.

    The first one's prompt is in the radix tree before the others are sent.
    """
    engine.loop.run_until_complete(_all_after_the_first(engine, requests))
    return _flush(engine)  # the next scenario starts with an empty tree


async def _all_after_the_first(engine, requests: list[dict]) -> None:
    prefilled = asyncio.Event()

    async def one(request: dict, is_first: bool) -> None:
        if not is_first:
            await prefilled.wait()
        async for _ in engine.tokenizer_manager.generate_request(_greedy(request), None):
            prefilled.set()

    await asyncio.gather(*(one(request, i == 0) for i, request in enumerate(requests)))


def _flush(engine) -> dict:
    """Empty the radix cache once nothing runs."""
    flush = engine.tokenizer_manager.flush_cache(timeout_s=_IDLE_S)
    flushed = engine.loop.run_until_complete(flush)
    if not flushed.success:
        raise RuntimeError(f"the radix cache was not flushed: {flushed.message}")
    return {}


def _greedy(request: dict):
    """Make a streamed request for exactly new_tokens tokens."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    return GenerateReqInput(
        rid=request.get("id"),
        input_ids=request["ids"],
        sampling_params={
            "max_new_tokens": request["new_tokens"],
            "ignore_eos": True,
            "temperature": 0,
        },
        stream=True,
    )


_OPS = {"time_batch": _time_batch, "generate": _generate, "flush": _flush}


def _answer(value: dict) -> None:
    print(MARK + json.dumps(value), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
