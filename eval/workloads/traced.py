"""Loads with the lengths and arrivals of traces, or drawn like them."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from datetime import datetime
from itertools import count
from pathlib import Path

import numpy as np

from eval.workloads.load import Load, Request
from eval.workloads.mooncake import BLOCK, first, read

# PAT section 8.2: a system prompt with a language and a country field, in Llama-3's tokens. How
# many of each is not said: here four languages, four countries of each.
_LEVELS = (46, 348, 2123)
_LANGUAGES = _COUNTRIES = 4
_CONVERSATIONS = 384
# Mooncake's tool/agent trace as published: tool prompts of 5 to 12 blocks of 512 tokens, 59 % of
# all prompt tokens found in the cache, 182 tokens generated on average.
_TOOL_BLOCKS = (*range(5, 13), *range(5, 13))
_HIT_SHARE, _AGENT_OUTPUT, _AGENTS = 0.59, 182.0, 160
_MOONCAKE = 48
# Logarithms' mean and standard deviation in Azure's conversation trace of 2023 (19,366 requests),
# and its longest prompt and answer.
_PROMPT, _LONGEST_PROMPT = (6.633, 0.985), 14050
_ANSWER, _LONGEST_ANSWER = (5.019, 0.859), 1000
_SPREAD = 0.8  # of the logarithms of an agent's own tokens


def conversation(seed: int, azure: Path | None) -> Load:
    """Put users' prompts below PAT's three levels of system prompt.

    azure  AzureLLMInferenceTrace_conv.csv, for lengths and arrivals; None: drawn like its
    """
    number = _CONVERSATIONS
    rng = np.random.default_rng(seed)
    if azure is None:
        prompts = rng.lognormal(*_PROMPT, number).clip(1, _LONGEST_PROMPT)
        answers = rng.lognormal(*_ANSWER, number).clip(1, _LONGEST_ANSWER)
        users = list(zip(_poisson(rng, number), prompts, answers, strict=True))
        source = "lengths and arrivals drawn like those of AzureLLMInferenceTrace_conv.csv"
    else:
        users = read_azure(azure, number)
        source = f"lengths and arrivals of {azure.name}"
    countries = rng.integers(_LANGUAGES * _COUNTRIES, size=number).tolist()
    own = count(1 + _LANGUAGES * (1 + _COUNTRIES))
    requests = []
    for country, (at, prompt, answer) in zip(countries, users, strict=True):
        keys = (0, 1 + country // _COUNTRIES, 1 + _LANGUAGES + country, next(own))
        lengths = (*_LEVELS, _tokens(prompt))
        requests.append(Request(tuple(zip(keys, lengths, strict=True)), _tokens(answer), at))
    return Load("conversation", tuple(requests), source)


def agent(seed: int) -> Load:
    """Draw requests below tool prompts with Mooncake's published figures.

    Tools are as popular as 1 / rank. What is a request's own is drawn and then scaled so that the
    published share of all prompt tokens can come from the cache.
    """
    number = _AGENTS
    rng = np.random.default_rng(seed)
    blocks = rng.permutation(_TOOL_BLOCKS)
    popularity = 1.0 / np.arange(1, len(blocks) + 1)
    tools = rng.choice(len(blocks), size=number, p=popularity / popularity.sum())
    shared = blocks[tools] * BLOCK
    hits = shared.sum() - blocks[np.unique(tools)].sum() * BLOCK
    own = rng.lognormal(0.0, _SPREAD, number)
    own *= (hits / _HIT_SHARE - shared.sum()) / own.sum()
    answers = rng.lognormal(0.0, _SPREAD, number)
    answers *= _AGENT_OUTPUT * number / answers.sum()
    drawn = zip(tools, shared, own, answers, _poisson(rng, number), strict=True)
    requests = []
    for i, (tool, prefix, private, answer, at) in enumerate(drawn):
        parts = ((int(tool), int(prefix)), (len(blocks) + i, _tokens(private)))
        requests.append(Request(parts, _tokens(answer), at))
    source = "drawn with the published figures of Mooncake's tool/agent trace"
    return Load("agent", tuple(requests), source)


def mooncake(path: Path | None, longest: int) -> Load:
    """Take the first requests of Mooncake's conversation trace of at most `longest` tokens.

    Raises ValueError for a trace that is none or too short; OSError."""
    if path is None:
        raise ValueError("load 'mooncake' needs --mooncake-trace")
    requests = first(read(path), _MOONCAKE, longest)
    return Load("mooncake", tuple(requests), f"{path.name}, requests of at most {longest} tokens")


def read_azure(path: Path, number: int) -> list[tuple[float, int, int]]:
    """Return (arrival in mean gaps, prompt tokens, generated tokens) of the first requests.

    Raises ValueError naming file and line, or for a file of too few lines; OSError."""
    rows = []
    with path.open(newline="") as lines:
        for row in csv.DictReader(lines):
            try:
                at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
                tokens = int(row["ContextTokens"]), int(row["GeneratedTokens"])
                if min(tokens) < 1:
                    raise ValueError("no tokens")
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{path}, line {len(rows) + 2}: expected TIMESTAMP, ContextTokens, "
                    f"GeneratedTokens: {error!r}"
                ) from None
            rows.append((at, *tokens))
            if len(rows) > number:
                break
    if len(rows) <= number:
        raise ValueError(f"{path} has {len(rows)} requests, {number + 1} are needed")
    first = rows[0][0]
    gap = (rows[number][0] - first) / number
    if gap <= 0:
        raise ValueError(f"{path}: its first {number + 1} requests do not arrive in order")
    return [((at - first) / gap, *tokens) for at, *tokens in rows[:number]]


def _tokens(drawn: float) -> int:
    return max(1, round(drawn))


def _poisson(rng: np.random.Generator, number: int) -> Iterable[float]:
    """Draw arrivals with a mean gap of 1, the first at 0."""
    gaps = rng.exponential(size=number - 1)
    return [0.0, *np.cumsum(gaps).tolist()]
