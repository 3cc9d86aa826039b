"""Engines of several backends along the tokens of the first one's: their log-probabilities of the
same tokens, judged by those of stock backends."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from eval.compare_outputs import seeded_engine, teacher
from eval.compare_outputs.subject import Subject
from eval.compare_outputs.teacher import Sampled
from eval.demo import near_ties
from eval.demo.near_ties import Difference
from eval.engine_process import EngineError, folder_name, uses_prefix

# Like the bound on attention: twice the error of what is known to be right.
_FACTOR = 2.0
# What two correct engines differ by in float32, but for that rounding.
_EXACT = Difference(1.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class LogprobError:
    """Decoded tokens of two engines, nats.

    mean, max      |difference| of the token's log-probability, over `tokens` tokens
    worst_request  the largest mean over one request's tokens
    equal_greedy   share of tokens where both would have chosen the same
    perplexity     of these tokens: the reference's and the other engine's
    """

    tokens: int
    mean: float
    worst_request: float
    max: float
    equal_greedy: float
    perplexity: tuple[float, float]


def compare(reference: Sequence[Sampled], other: Sequence[Sampled]) -> LogprobError:
    """Compare the tokens of `other`. Raises ValueError unless the reference has the same."""
    errors, equal, pairs = defaultdict(list), [], same_steps(reference, other)
    for same, step in pairs:
        errors[step.request].append(abs(same.logprob - step.logprob))
        equal.append(same.greedy == step.greedy)
    every = [error for of_request in errors.values() for error in of_request]
    surprise = (fmean(-step.logprob for step in steps) for steps in zip(*pairs, strict=True))
    return LogprobError(
        tokens=len(every), mean=fmean(every), worst_request=max(map(fmean, errors.values())),
        max=max(every), equal_greedy=fmean(equal), perplexity=tuple(map(math.exp, surprise)),
    )  # fmt: skip


def same_steps(
    reference: Sequence[Sampled], other: Sequence[Sampled]
) -> list[tuple[Sampled, Sampled]]:
    """Pair each step of `other` with the reference's. Raises ValueError where there is none, or it
    went on with another token."""
    known = {(step.request, step.context): step for step in reference}
    missing = sum((step.request, step.context) not in known for step in other)
    if missing or not other:
        raise ValueError(f"{missing} of {len(other)} decoded tokens are not the reference's")
    pairs = [(known[step.request, step.context], step) for step in other]
    for same, step in pairs:
        if same.token != step.token:
            raise ValueError(f"{step.request} went on with another token at {step.context}")
    return pairs


def greedy_texts(steps: Sequence[Sampled]) -> list[near_ties.Output]:
    """Make of each request's steps the text that the engine would have written along them."""
    texts = defaultdict(list)
    for step in sorted(steps, key=lambda step: (step.request, step.context)):
        texts[step.request].append((step.greedy, step.top))
    return [
        near_ties.Output(name, *map(tuple, zip(*text, strict=True))) for name, text in texts.items()
    ]


def differ(reference: Sequence[Sampled], other: Sequence[Sampled]) -> Difference:
    """Compare greedy texts, of which both engines have seen the same contexts. Raises ValueError as
    compare does."""
    same, steps = zip(*same_steps(reference, other), strict=True)
    return near_ties.differ(greedy_texts(same), greedy_texts(steps))


def problem(tested: LogprobError, noise: Sequence[LogprobError]) -> str | None:
    """Say why an engine is further from the reference than stock ones are (`noise`; in float32 none
    are needed), or return None."""
    for name in ("mean", "worst_request"):
        error = getattr(tested, name)
        allowed = _FACTOR * max([near_ties.ROUNDING, *(getattr(n, name) for n in noise)])
        if not error <= allowed:
            return f"{name.replace('_', ' ')} error {error:.4f}, at most {allowed:.4f}"
    return None


def turned_problem(tested: Difference, noise: Sequence[Difference]) -> str | None:
    """Say why greedy texts part elsewhere than at near-ties, as those of stock engines do (in
    float32 no other is needed), or return None."""
    found = [near_ties.verdict(tested, of_two) for of_two in noise or [_EXACT]]
    return "; ".join(min(found, key=len)) or None


def judge_engines(page_size: int, subject: Subject, home: Path, args) -> Iterator[tuple[dict, str]]:
    """Yield the row and its text of each scenario and backend after the first, the others' teacher.
    Raises EngineError, also when the engines did not decode the same tokens."""
    reference, *others = args.backends
    first = _record(reference, page_size, subject, home, args)
    records = {backend: _record(backend, page_size, subject, home, args) for backend in others}
    stock = [backend for backend in others if not uses_prefix(backend)]
    for name in subject.requests:
        try:
            errors = {b: compare(first[name], records[b][name]) for b in others}
            texts = {b: differ(first[name], records[b][name]) for b in others}
        except ValueError as error:
            raise EngineError(f"{name}: {error}") from None
        for backend, error in errors.items():
            wrong = None
            if uses_prefix(backend):
                wrong = problem(error, [errors[b] for b in stock])
                wrong = wrong or turned_problem(texts[backend], [texts[b] for b in stock])
            row = {
                "scenario": name, "page_size": page_size, "reference": reference,
                "backend": backend, **asdict(error), "widest_turned_gap": texts[backend].max_gap,
                "problem": wrong,
            }  # fmt: skip
            yield row, _text(row)


def _record(
    backend: str, page_size: int, subject: Subject, home: Path, args
) -> dict[str, list[teacher.Sampled]]:
    """Return what an engine decoded of each scenario; of a prefix backend, in prefix steps."""
    folder, lesson = home / folder_name(backend), home / "lesson.jsonl"
    record = folder / "record"
    folder.mkdir(parents=True)
    named = {
        name: [request | {"id": f"{name}/{i}"} for i, request in enumerate(requests)]
        for name, requests in subject.requests.items()
    }
    every = [request for requests in named.values() for request in requests]
    is_first = not lesson.exists()
    if is_first:
        for request in every:
            teacher.write(
                lesson, teacher.fixed(request["id"], len(request["ids"]), request.get("then", ()))
            )
    env = {teacher.RECORD_ENV: str(record), teacher.TEACHER_ENV: str(lesson)}
    engine_of = seeded_engine.judged(backend, page_size, subject.model, folder, args, teacher, env)
    with engine_of as engine:
        for requests in named.values():
            engine.ask("generate", requests=requests)
    if is_first:
        lesson.write_text(record.read_text())
    wanted = ["prefix"] if uses_prefix(backend) else [None]
    # Overlap scheduling may run a step too many.
    ends = {request["id"]: len(request["ids"]) + request["new_tokens"] for request in every}
    steps = [
        step
        for step in teacher.read(record)
        if step.decode and step.context < ends.get(step.request, 0) and step.variant in wanted
    ]
    return {name: [s for s in steps if s.request.startswith(f"{name}/")] for name in named}


def _text(row: dict) -> str:
    return (
        f"  {row['scenario']}, {row['backend']} against {row['reference']}: {row['tokens']} "
        f"tokens, log-probabilities differ by {row['mean']:.2e} nats (worst request "
        f"{row['worst_request']:.2e}, largest {row['max']:.2e}), equal greedy tokens "
        f"{row['equal_greedy']:.4f}, perplexity {row['perplexity'][1]:.3f} "
        f"(reference {row['perplexity'][0]:.3f})"
    )
