"""The experiments by name: the one place that knows all of them."""

from __future__ import annotations

from eval.papers import chunkattention, packinfer, pat, persistentkv, prefetch
from eval.papers.experiment import Experiment

_PAPERS = (pat, packinfer, persistentkv, chunkattention, prefetch)
EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment for paper in _PAPERS for experiment in paper.EXPERIMENTS
}

# What needs nothing but a GPU, and what there is.
GROUPS = {
    "kernels": tuple(e for e in EXPERIMENTS.values() if e.derive is None),
    "all": tuple(EXPERIMENTS.values()),
}


def find(names: list[str]) -> list[Experiment]:
    """Return the experiments of these names and groups, each once.

    Raises ValueError naming one that does not exist.
    """
    if unknown := [name for name in names if name not in GROUPS and name not in EXPERIMENTS]:
        known = ", ".join([*GROUPS, *EXPERIMENTS])
        raise ValueError(f"experiment {unknown[0]!r}: known are {known}")
    chosen = [e for name in names for e in GROUPS.get(name) or (EXPERIMENTS[name],)]
    return list({e.name: e for e in chosen}.values())
