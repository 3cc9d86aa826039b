"""Rows of the papers' experiments as Markdown: each paper's numbers, with ours beside them."""

from __future__ import annotations

from eval.markdown import table
from eval.papers.experiment import NOT_MEASURED, Claim
from eval.papers.experiments import EXPERIMENTS

COLUMNS = ("experiment", "figure", "paper", "expected on an H200", "measured")


def merged(files: list[list[dict]]) -> list[dict]:
    """Join the rows of several files; an experiment's are those of the last file that measured
    it, or of the first that expects something of it."""
    by_experiment: dict[str, list[dict]] = {}
    for rows in files:
        for name in dict.fromkeys(row["experiment"] for row in rows):
            mine = [row for row in rows if row["experiment"] == name]
            if name not in by_experiment or any(row["status"] != NOT_MEASURED for row in mine):
                by_experiment[name] = mine
    return [row for rows in by_experiment.values() for row in rows]


def markdown(rows: list[dict]) -> str:
    """Write one table, in the papers' order, what is wrong in it, and a list of the commands.

    Raises ValueError naming an experiment that does not exist.
    """
    names = {row["experiment"] for row in rows}
    if unknown := sorted(names - set(EXPERIMENTS)):
        raise ValueError(f"experiment {unknown[0]!r}: known are {', '.join(EXPERIMENTS)}")
    experiments = [e for e in EXPERIMENTS.values() if e.name in names]
    lines: list[tuple[str, ...]] = []
    for experiment in experiments:
        mine = [row for row in rows if row["experiment"] == experiment.name]
        for i, claim in enumerate(experiment.claims):
            first = "" if i else f"`{experiment.name}`: {experiment.place}"
            lines.append((first, claim.says, claim.paper, *_ours(claim, mine)))
    commands = "\n".join(f"- `{e.command}`\n  {e.missing}" for e in experiments)
    return "\n\n".join([table(COLUMNS, lines), *_problems(rows), commands])


def _ours(claim: Claim, rows: list[dict]) -> tuple[str, str]:
    """Return what was expected and what was measured."""
    if claim.expected is not None:
        return claim.expected, claim.figure(rows, "")
    return claim.figure(rows, "expected_"), claim.figure(rows, "")


def _problems(rows: list[dict]) -> list[str]:
    """List rows that have no time for a reason of their own."""
    fine = ("ok", "counted", NOT_MEASURED)
    bad = [row for row in rows if row["status"] not in fine]
    lines = [
        f"- `{row['experiment']}`, `{row['batch']}`, {row['provider']}: {row['status']}"
        for row in bad
    ]
    return ["\n".join(lines)] if lines else []
