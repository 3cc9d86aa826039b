"""Child process with one SGLang engine; see engine_process.py, which starts it.

    python -m eval.engine_worker CONFIG.json

Reads one JSON command a line from stdin and answers each with one marked JSON line on stdout.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

MARK = "@@eval@@"


def main(path: str) -> None:
    import sglang

    start = time.perf_counter()
    engine = sglang.Engine(**json.loads(Path(path).read_text()))
    _answer({"start_s": round(time.perf_counter() - start, 1)})
    for line in sys.stdin:
        command = json.loads(line)
        try:
            _answer(_OPS[command.pop("op")](engine, **command))
        except Exception as error:  # the parent decides what a failed request means
            _answer({"error": f"{type(error).__name__}: {error}"})
    engine.shutdown()


def _time_batch(engine, ids: list[list[int]], new_tokens: int) -> dict:
    """Seconds for a greedy batch that arrives at once."""
    sampling = {"max_new_tokens": new_tokens, "ignore_eos": True, "temperature": 0}
    start = time.perf_counter()
    engine.generate(input_ids=ids, sampling_params=sampling)
    return {"seconds": time.perf_counter() - start}


def _outputs(engine, requests: list[dict]) -> dict:
    """Greedy tokens of each request with the two best log-probabilities of every step.

    A request has ids, new_tokens and perhaps after = [other request, its token count]: it is sent
    when the other one has that many tokens, so that every backend sees the same joins.
    """
    outputs = engine.loop.run_until_complete(_all(engine, requests))
    engine.flush_cache()  # the next scenario starts with an empty tree
    return {"outputs": outputs}


async def _all(engine, requests: list[dict]) -> list[dict]:
    events: dict[tuple[int, int], asyncio.Event] = {
        tuple(request["after"]): asyncio.Event() for request in requests if request.get("after")
    }
    return await asyncio.gather(
        *(_one(engine, i, request, events) for i, request in enumerate(requests))
    )


async def _one(engine, index: int, request: dict, events: dict) -> dict:
    from sglang.srt.managers.io_struct import GenerateReqInput

    if request.get("after"):
        await events[tuple(request["after"])].wait()
    sent = GenerateReqInput(
        input_ids=request["ids"],
        sampling_params={
            "max_new_tokens": request["new_tokens"],
            "ignore_eos": True,
            "temperature": 0,
        },
        return_logprob=True,
        top_logprobs_num=2,
        stream=True,
    )
    chunk = {}
    async for chunk in engine.tokenizer_manager.generate_request(sent, None):
        for (other, count), event in events.items():
            if other == index and len(chunk["output_ids"]) >= count:
                event.set()
    top = chunk["meta_info"]["output_top_logprobs"]
    return {
        "tokens": list(chunk["output_ids"]),
        "top": [[(token, logprob) for logprob, token, _ in step] for step in top],
    }


_OPS = {"time_batch": _time_batch, "outputs": _outputs}


def _answer(value: dict) -> None:
    print(MARK + json.dumps(value), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
