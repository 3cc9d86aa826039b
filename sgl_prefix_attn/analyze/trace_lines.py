"""One line of a trace file -> a request. Formats are told apart line by line.

Mooncake's   {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}
generic      {"prompt": token ids or text, "output_length": n, "arrival": s, "n": 1}; the last two
             may be left out, and the prompt may be called input_ids or text
SGLang's     {"conversations": [{"content": prompt}, {"content": answer}], "output_len": n,
custom data  "timestamp": ms}; the last two may be left out
SGLang's log of requests, sglang_log.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson

from sgl_prefix_attn.analyze import sglang_log
from sgl_prefix_attn.analyze.trace import Request

HASHED = 512  # prompt tokens behind one of Mooncake's hash ids
BLOCK = 32  # prompt tokens that are compared at once
CHARACTERS = 4  # of text are taken for a token


def parse(line: bytes, words: bool = False) -> Request:
    """Read a line that is not empty; words: of text, each word is a token.

    Raises ValueError that says what is wrong with it.
    """
    logged = sglang_log.parse(line)
    if logged is not None:
        prompt = _content(logged.prompt, words, logged.is_cut)
        return _request(
            prompt, logged.arrival, logged.output, size=logged.tokens, is_cut=logged.is_cut
        )
    row = _json(line)
    if "hash_ids" in row:
        return _mooncake(row)
    if "conversations" in row:
        return _conversation(row, words)
    given = [row[name] for name in ("prompt", "input_ids", "text") if row.get(name) is not None]
    if not given:
        raise ValueError("it has neither hash_ids nor prompt (input_ids, text) nor conversations")
    arrival = row.get("arrival")
    return _request(
        _content(given[0], words),
        None if arrival is None else _number(row, "arrival"),
        _count(row, "output_length"),
        samples=_count(row, "n") if "n" in row else 1,
    )


def _mooncake(row: dict[str, Any]) -> Request:
    prompt = _count(row, "input_length")
    content = _integers(row["hash_ids"])
    if content.size * HASHED < prompt:
        raise ValueError(f"{content.size} hash_ids for {prompt} tokens")
    return Request(
        arrival=_number(row, "timestamp") / 1e3,
        prompt=prompt,
        output=_count(row, "output_length"),
        content=content,
        per_block=1,
        block_tokens=HASHED,
    )


def _conversation(row: dict[str, Any], words: bool) -> Request:
    try:
        prompt, answer = (turn["content"] for turn in row["conversations"][:2])
    except (TypeError, KeyError, ValueError):
        raise ValueError("its conversations are no prompt and answer with their content") from None
    if "output_len" in row:
        output = _count(row, "output_len")
    else:
        content, per_token = _content(answer, words)
        output = -(-content.size // per_token)
    arrival = _number(row, "timestamp") / 1e3 if "timestamp" in row else None
    return _request(_content(prompt, words), arrival, output)


def _request(prompt, arrival, output, *, size=None, samples=1, is_cut=False) -> Request:
    content, per_token = prompt
    return Request(
        arrival=arrival,
        prompt=-(-content.size // per_token) if size is None else size,
        output=output,
        content=content,
        per_block=BLOCK * per_token,
        block_tokens=BLOCK,
        samples=samples,
        is_cut=is_cut,
    )


def _content(prompt: Any, words: bool, is_cut: bool = False) -> tuple[np.ndarray, int]:
    """What the prompt is made of, tokens, words or characters, and how many of them are a token; of
    one that was cut only whole blocks."""
    if isinstance(prompt, str) and words:
        content, per_token = np.array([hash(word) for word in prompt.split()], np.int64), 1
    elif isinstance(prompt, str):
        content, per_token = _characters(prompt), CHARACTERS
    elif isinstance(prompt, list):
        content, per_token = _integers(prompt), 1
    else:
        raise ValueError("its prompt is neither a list of token ids nor text")
    block = BLOCK * per_token
    return content[: content.size // block * block] if is_cut else content, per_token


def _characters(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def _integers(values: Any) -> np.ndarray:
    """uint64 [...]"""
    try:
        if set(map(type, values)) == {int}:
            return np.array(values, np.uint64)
    except (TypeError, OverflowError):
        pass
    raise ValueError("hash_ids, or the prompt, must be integers of at least 0, one at least")


def _json(line: bytes) -> dict[str, Any]:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError("no JSON object")
    return row


def _number(row: dict[str, Any], name: str) -> float:
    value = row.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ValueError(f"its {name} must be a number, not {str(value)[:40]}")
    return float(value)


def _count(row: dict[str, Any], name: str) -> int:
    value = row.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"its {name} must be an integer, not {str(value)[:40]}")
    return value
