"""Engines of several backends along the tokens of the first one's."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from eval.compare_outputs import scenarios, seeded_engine, teacher
from eval.compare_outputs.logprob_judgement import compare, problem
from eval.engine_process import (
    EngineError,
    folder_name,
    uses_prefix,
)

_TEACHER = "record.jsonl"


def judge_engines(page_size: int, model: Path, home: Path, args) -> list[dict]:
    """Return a row for each scenario and backend after the first, the others' teacher. Raises
    EngineError, also when the engines did not decode the same tokens."""
    reference, *others = args.backends
    first = _record(reference, page_size, model, home, args)
    records = {backend: _record(backend, page_size, model, home, args) for backend in others}
    rows = []
    for name in args.scenarios:
        try:
            errors = {backend: compare(first[name], records[backend][name]) for backend in others}
        except ValueError as error:
            raise EngineError(f"{name}: {error}") from None
        noise = [error for backend, error in errors.items() if not uses_prefix(backend)]
        for backend, error in errors.items():
            place = {"scenario": name, "page_size": page_size, "reference": reference}
            wrong = problem(error, noise) if uses_prefix(backend) else None
            rows.append({**place, "backend": backend, **asdict(error), "problem": wrong})
            print(_text(rows[-1]), flush=True)
    return rows


def _record(
    backend: str, page_size: int, model: Path, home: Path, args
) -> dict[str, list[teacher.Sampled]]:
    """Return what an engine decoded of each scenario; of a prefix backend, in prefix steps."""
    folder, lesson = home / folder_name(backend), home / _TEACHER
    record = folder / "record"
    folder.mkdir(parents=True)
    env = teacher.configure(record, lesson if lesson.exists() else None)
    vocab = seeded_engine.vocab(args.model_shape)
    ends = {}  # tokens of a request and its answer: overlap scheduling may run a step too many
    with seeded_engine.judged(backend, page_size, model, folder, args, teacher, env) as engine:
        for name in args.scenarios:
            requests = scenarios.build(name, vocab, args.new_tokens, args.scale)
            named = [request | {"id": f"{name}/{i}"} for i, request in enumerate(requests)]
            ends |= {request["id"]: len(request["ids"]) + args.new_tokens for request in named}
            engine.ask("generate", requests=named)
    if not lesson.exists():
        lesson.symlink_to(record)
    wanted = ["prefix"] if uses_prefix(backend) else [None]
    steps = [
        step
        for step in teacher.read(record)
        if step.decode and step.context < ends.get(step.request, 0) and step.variant in wanted
    ]
    return {name: [s for s in steps if s.request.startswith(f"{name}/")] for name in args.scenarios}


def _text(row: dict) -> str:
    text = (
        f"  {row['scenario']}, {row['backend']} against {row['reference']}: {row['tokens']} "
        f"tokens, log-probabilities differ by {row['mean']:.2e} nats (worst request "
        f"{row['worst_request']:.2e}, largest {row['max']:.2e}), equal greedy tokens "
        f"{row['equal_greedy']:.4f}"
    )
    return f"{text}\n    WRONG: {row['problem']}" if row["problem"] else text
