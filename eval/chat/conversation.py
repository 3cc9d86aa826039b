"""Requests of one help desk: a system prompt that all share, and what the server says it ran."""

from __future__ import annotations

import json
import urllib.error
from concurrent.futures import ThreadPoolExecutor

from eval.counters import KV_TOKENS, STEPS, Counters, by_labels, total
from eval.server_process import fetch

SYSTEM = """\
You are the help desk of a swimming pool. Answer in one short sentence, from these facts alone.
The pool is open from seven in the morning to nine in the evening on weekdays, and from nine to six
on Saturdays and Sundays. It is closed in the last week of August, when the water is changed.
A ticket for one visit costs four dollars, and two dollars for children under fourteen. Ten visits
cost thirty dollars. Children under three swim for free. Children under eight come with an adult.
Lockers take a coin of one dollar, which they give back. Towels can be rented for two dollars at the
front desk, and caps are for sale there for three. Caps must be worn in the large pool.
The large pool is fifty meters long and two meters deep, and its water has twenty-six degrees. The
small pool is one meter deep and has thirty degrees. The sauna is on the first floor and costs six
dollars more; it is for women alone on Mondays. The cafe closes one hour before the pool does.
Swimming lessons for children are on Tuesdays and Thursdays at four, for adults on Wednesdays at
seven in the evening. A course of ten lessons costs sixty dollars. Found things are kept at the
front desk for a month. Bicycles stand behind the building; there is no place to park a car."""
QUESTIONS = (
    "When do you open on Sunday?", "What does a ticket for one visit cost?",
    "How deep is the small pool?", "When are swimming lessons for adults?", "Can I rent a towel?",
    "When is the sauna for women alone?",
)  # fmt: skip
_LIMIT_S = 600  # a CPU writes some ten tokens a second for all requests together


class ChatError(RuntimeError):
    """The server did not answer a chat: one sentence."""


def messages(question: str) -> list[dict[str, str]]:
    """Write a chat: the system prompt that every request begins with, then its question."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def ask_all(url: str, max_tokens: int) -> list[str]:
    """Return the answers to QUESTIONS, asked all at once. Raises ChatError.

    The first is asked alone for one token, so that the others find the system prompt cached."""
    _ask(url, QUESTIONS[0], 1)
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        return list(pool.map(lambda question: _ask(url, question, max_tokens), QUESTIONS))


def _ask(url: str, question: str, max_tokens: int) -> str:
    body = {
        "model": "default", "messages": messages(question), "max_tokens": max_tokens,
        "temperature": 0,
    }  # fmt: skip
    try:
        answer = fetch(f"{url}/v1/chat/completions", body=body, limit_s=_LIMIT_S)
        return json.loads(answer)["choices"][0]["message"]["content"].strip()
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")[:200]
        raise ChatError(f"{url} answered {error.code}: {said}") from None
    except OSError as error:
        raise ChatError(f"{url} does not answer: {error}") from None


def steps_and_kv(grown: Counters) -> list[str]:
    """Write a line for each kind of decode step, and one for the KV tokens that they read, of what
    a server's counters grew by."""
    steps = by_labels(grown, STEPS, "variant", "reason")
    if not steps:
        return ["no decode step of prefix_attn was counted: is this a server with the backend?"]
    lines = sorted(
        "{:.0f} decode steps: {} ({})".format(count, *name.split(":"))
        for name, count in steps.items()
    )
    read, stock = (total(grown, KV_TOKENS, kind=kind) for kind in ("read", "query_centric"))
    if stock:
        share = f"{1 - read / stock:.0%} saved"
        lines.append(f"{read:.0f} KV tokens read a layer, {stock:.0f} without sharing: {share}")
    return lines
