"""Planted faults: the comparison must fail under each of them.

An SGLang plugin of the evaluation, loaded into the engine's processes by eval.engine_process when
a fault is asked for; it changes what the library computes there. Every time the fault takes effect
a line goes to $EVAL_FAULT_LOG, so that a fault that was never planted cannot pass as one survived.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

FAULT_ENV, LOG_ENV = "EVAL_FAULT", "EVAL_FAULT_LOG"


def register() -> None:
    name, log = os.environ.get(FAULT_ENV), os.environ.get(LOG_ENV)
    if name and log:
        FAULTS[name](lambda: _note(Path(log), name))


def times_planted(log: Path) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0


def _note(log: Path, name: str) -> None:
    with log.open("a") as out:
        out.write(name + "\n")


def _drop_node(planted: Callable[[], None]) -> None:
    """Leave the shared node read by the most queries out of the plan."""
    from sgl_prefix_attn.plan.planner import Planner

    plan_forest = Planner.plan_forest

    def faulty(self, forest, before=None):
        changed = without_largest_node(forest)
        if changed is not forest:
            planted()
        return plan_forest(self, changed, before)

    Planner.plan_forest = faulty  # type: ignore[method-assign]


def _swap_tails(planted: Callable[[], None]) -> None:
    """Read two requests' private tails from each other's slots."""
    from sgl_prefix_attn.plan import search

    make_tiles = search.make_tiles

    def faulty(forest, *args):
        good = make_tiles(forest, *args)
        run = with_two_tail_runs_swapped(forest, good.run)
        if run is good.run:
            return good
        planted()
        return replace(good, run=run)

    search.make_tiles = faulty


def _skip_append(planted: Callable[[], None]) -> None:
    """Do not write the slot of the newest token: its index keeps what stood there."""
    from sgl_prefix_attn.execute.executor import PlanExecutor

    append = PlanExecutor.append

    def faulty(self, *args, **kwargs):
        # All of append runs (it also resets the kernels' queues), then the indices are put back;
        # both are captured in the graph.
        before = self.workspace.kv_indices.clone()
        append(self, *args, **kwargs)
        self.workspace.kv_indices.copy_(before)
        planted()

    PlanExecutor.append = faulty


FAULTS = {"drop_node": _drop_node, "swap_tails": _swap_tails, "skip_append": _skip_append}


def without_largest_node(forest):
    """Take all tokens but the last one from the node with the most queries; the same object where
    there is nothing to take."""
    if not forest.parent.size:
        return forest
    lost = np.argmax(forest.num_queries)
    if forest.end[lost] - forest.start[lost] < 2:
        return forest
    start = forest.start.copy()
    start[lost] = forest.end[lost] - 1
    return replace(forest, start=start)


def with_two_tail_runs_swapped(forest, run) -> np.ndarray:
    """Exchange the requests of two tails among the runs of tiles, of one place and length where
    there are such; return the runs themselves when there are no two. A small batch is read request
    by request: then a run holds a shared node and the tail below it."""
    from sgl_prefix_attn.plan.tiles import R_LEN, R_REQUEST, R_START

    begins, start = run[:, R_START], forest.tail_start[run[:, R_REQUEST]]
    tails = np.flatnonzero((begins <= start) & (start < begins + run[:, R_LEN]))
    if tails.size < 2:
        return run
    _, place, counts = np.unique(
        run[tails][:, [R_START, R_LEN]], axis=0, return_inverse=True, return_counts=True
    )
    pair = (tails[place.ravel() == counts.argmax()] if counts.max() > 1 else tails)[:2]
    changed = run.copy()
    changed[pair, R_REQUEST] = run[pair[::-1], R_REQUEST]
    return changed
