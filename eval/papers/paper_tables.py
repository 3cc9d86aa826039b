"""Rows of the papers' experiments as Markdown: each paper's numbers, with ours beside them."""

from __future__ import annotations

from eval.markdown import table
from eval.papers.experiment import Experiment
from eval.papers.experiments import EXPERIMENTS

COLUMNS = ("experiment", "figure", "paper", "expected on an H200", "measured", "counted")


def figures(rows: list[dict]) -> list[dict]:
    """Put ours beside the papers' numbers: experiment, figure, paper, expected, and measured or
    counted, as text, in the papers' order. Raises ValueError naming an experiment that does not
    exist."""
    return [
        {
            "experiment": experiment.name,
            "figure": claim.says,
            "paper": claim.paper,
            "expected": claim.expected,
            "measured": "" if claim.counted else claim.figure(mine),
            "counted": claim.figure(mine) if claim.counted else "",
        }
        for experiment, mine in _by_experiment(rows)
        for claim in experiment.claims
    ]


def markdown(rows: list[dict]) -> str:
    """Write figures() as one table, what is wrong in it, and a list of the commands."""
    lines, seen = [], set()
    for row in figures(rows):
        name, *cells = row.values()
        place = f"`{name}`: {EXPERIMENTS[name].place}"
        lines.append(("" if name in seen else place, *cells))
        seen.add(name)
    commands = "\n".join(f"- `{e.command}`\n  {e.missing}" for e, _ in _by_experiment(rows))
    parts = table(COLUMNS, lines), _problems(rows), commands
    return "\n\n".join(part for part in parts if part)


def _by_experiment(rows: list[dict]) -> list[tuple[Experiment, list[dict]]]:
    names = {row["experiment"] for row in rows}
    if unknown := sorted(names - set(EXPERIMENTS)):
        raise ValueError(f"experiment {unknown[0]!r}: known are {', '.join(EXPERIMENTS)}")
    return [
        (experiment, [row for row in rows if row["experiment"] == name])
        for name, experiment in EXPERIMENTS.items()
        if name in names
    ]


def _problems(rows: list[dict]) -> str:
    """List rows that have no time for a reason of their own."""
    return "\n".join(
        f"- `{row['experiment']}`, `{row['batch']}`, {row['provider']}: {row['status']}"
        for row in rows
        if row["status"] not in ("ok", "counted")
    )
