"""One line of a trace file -> a request. Formats are told apart line by line, by a field.

hash_ids       Mooncake's and Bailian's {"timestamp": .., "input_length": n, "output_length": n,
               "hash_ids": [..]}
body           OpenAI's batches {"custom_id": .., "body": one of those below}
messages       chats [{"role": .., "content": ..}, ..]; of the last one's role assistant is the
               answer
conversations  ShareGPT's [{"value": prompt}, {"value": answer}, ..], where SGLang's custom data has
               content for value; what comes after is not read, as SGLang's benchmarks do
prompt         token ids or text, also called input_ids or text

and SGLang's log of requests, sglang_log.py. When a request came is its `arrival` in seconds or its
`timestamp` in milliseconds, Bailian's in seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import orjson

from sgl_prefix_attn.tools.analyze import sglang_log
from sgl_prefix_attn.tools.analyze.trace import Request

CHARACTERS = 4  # of text are taken for a token
Row = dict[str, Any]


class Options(NamedTuple):
    """words: of text each is a token; time_unit: seconds, None: the format's."""

    words: bool = False
    time_unit: float | None = None


DEFAULTS = Options()


def parse(line: bytes | Any, options: Options = DEFAULTS) -> Request:
    """Read a line that is not empty, or what JSON has made of it.

    Raises ValueError that says what is wrong with it.
    """
    if not isinstance(line, bytes):
        return _parse_row(line, options)
    logged = sglang_log.parse(line)
    if logged is not None:
        return Request(
            logged.arrival,
            logged.tokens,
            logged.output,
            *_content(logged.prompt, options),
            is_cut=logged.is_cut,
            is_counted=isinstance(logged.prompt, str),
        )
    try:
        return _parse_row(orjson.loads(line), options)
    except orjson.JSONDecodeError as error:
        if b"," in line and b"{" not in line:
            raise ValueError("no JSON but CSV, which does not tell what prompts share") from None
        raise ValueError(f"no JSON: {error}") from None


def _parse_row(row: Any, options: Options) -> Request:
    if not isinstance(row, dict):
        raise ValueError("no JSON object")
    for field, read in _READERS.items():
        if row.get(field) is not None:
            return read(row, row[field], options)
    raise ValueError(f"it has none of {', '.join(_READERS)}")


def _hashed(row: Row, hash_ids: Any, options: Options) -> Request:
    return Request(
        arrival=_arrival(row, options),
        prompt=_count(row, "input_length"),
        output=_output(row),
        content=_integers(hash_ids),
        per_token=None,
    )


def _batch(row: Row, body: Any, options: Options) -> Request:
    if not isinstance(body, dict) or "body" in body:
        raise ValueError("its body is no request")
    return _parse_row(body | {name: row[name] for name in _TIMES if name in row}, options)


def _chat(row: Row, messages: Any, options: Options) -> Request:
    try:
        turns = [(message["role"], _said(message)) for message in messages]
        prompt = _json_text(row.get("tools"))  # chat templates begin with them
    except (TypeError, KeyError, AttributeError):
        raise ValueError(
            "its messages are not roles and text (of an image no token count is known)"
        ) from None
    answer = turns.pop()[1] or None if turns and turns[-1][0] == "assistant" else None
    prompt += "".join(f"{role}\n{text}\n" for role, text in turns)
    return _prompted(row, prompt, options, answer)


def _said(message: Row) -> str:
    """The text of a chat message, the calls of tools included."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    return content + _json_text(message.get("tool_calls"))


def _json_text(value: Any) -> str:
    return orjson.dumps(value).decode() if value else ""


def _conversation(row: Row, turns: Any, options: Options) -> Request:
    try:
        prompt, answer = (
            turn["content"] if "content" in turn else turn["value"] for turn in turns[:2]
        )
    except (TypeError, KeyError, ValueError):
        raise ValueError("its conversations are no prompt and answer with their content") from None
    return _prompted(row, prompt, options, answer)


def _prompted(row: Row, prompt: Any, options: Options, answer: Any = None) -> Request:
    """A request whose prompt, and perhaps answer, the trace has."""
    content, per_token = _content(prompt, options)
    tokens = None
    if answer is not None:
        answered, per_answered = _content(answer, options)
        tokens = -(-answered.size // per_answered)
    return Request(
        arrival=_arrival(row, options),
        prompt=-(-content.size // per_token),
        output=_output(row, tokens),
        content=content,
        per_token=per_token,
        samples=_count(row, "n") if row.get("n") is not None else 1,
    )


_READERS: dict[str, Callable[[Row, Any, Options], Request]] = {
    "hash_ids": _hashed,
    "body": _batch,
    "messages": _chat,
    "conversations": _conversation,
    "prompt": _prompted,
    "input_ids": _prompted,
    "text": _prompted,
}
_TIMES = {"arrival": 1.0, "timestamp": 1e-3}  # seconds
_OUTPUTS = ("output_length", "output_len", "output_tokens")
_LIMITS = ("max_completion_tokens", "max_tokens")


def _arrival(row: Row, options: Options) -> float | None:
    for name, unit in _TIMES.items():
        if row.get(name) is not None:
            if type(row[name]) not in (int, float):
                raise ValueError(f"its {name} must be a number, not {str(row[name])[:40]}")
            unit = 1.0 if "chat_id" in row else unit  # Bailian's, in seconds
            return float(row[name]) * (options.time_unit or unit)
    return None


def _output(row: Row, answered: int | None = None) -> int:
    """How many tokens were generated, or may be at most where nothing else is said."""
    for name in _OUTPUTS:
        if row.get(name) is not None:
            return _count(row, name)
    if answered is not None:
        return answered
    for name in _LIMITS:
        if row.get(name) is not None:
            return _count(row, name)
    raise ValueError(f"it has no answer, nor any of {', '.join((*_OUTPUTS, *_LIMITS))}")


def _content(prompt: Any, options: Options) -> tuple[np.ndarray, int]:
    """What the prompt is made of, tokens, words or characters, and how many of them are a token."""
    if isinstance(prompt, str) and options.words:
        return np.array([hash(word) for word in prompt.split()], np.int64), 1
    if isinstance(prompt, str):
        return np.frombuffer(prompt.encode("utf-32-le", "surrogatepass"), np.uint32), CHARACTERS
    if isinstance(prompt, list):
        return _integers(prompt), 1
    raise ValueError("its prompt is neither a list of token ids nor text")


def _integers(values: Any) -> np.ndarray:
    """uint64 [...]"""
    try:
        if set(map(type, values)) == {int}:
            return np.array(values, np.uint64)
    except (TypeError, OverflowError):
        pass
    raise ValueError("hash_ids, or the prompt, must be integers of at least 0, one at least")


def _count(row: Row, name: str) -> int:
    if type(value := row.get(name)) is not int:  # True is an int, too
        raise ValueError(f"its {name} must be an integer, not {str(value)[:40]}")
    return value
