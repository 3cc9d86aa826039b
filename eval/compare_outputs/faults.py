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
    from sgl_prefix_attn import plan

    make_packs = plan.make_packs

    def faulty(*args):
        packs = make_packs(*args)
        changed = without_largest_shared(packs)
        if changed is not packs:
            planted()
        return changed

    plan.make_packs = faulty


def _swap_tails(planted: Callable[[], None]) -> None:
    """Read two requests' private tails from each other's slots."""
    from sgl_prefix_attn.plan import Planner

    plan = Planner.plan_forest

    def faulty(self, forest):
        good = plan(self, forest)
        words = with_two_tails_swapped(good)
        if words is good.words:
            return good
        planted()
        return replace(good, words=words)

    Planner.plan_forest = faulty


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


def without_largest_shared(packs):
    """Drop the shared pack with the most queries; the same object when none is shared."""
    queries = np.diff(packs.query_offset)
    shared = np.flatnonzero((packs.tail < 0) & (queries > 1))
    if not shared.size:
        return packs
    lost = shared[np.argmax(queries[shared])]
    keep = np.arange(queries.size) != lost
    first, last = packs.query_offset[lost : lost + 2]
    return replace(
        packs,
        kv_start=packs.kv_start[keep],
        kv_end=packs.kv_end[keep],
        tail=packs.tail[keep],
        query_offset=np.concatenate(([0], np.cumsum(queries[keep]))).astype(np.int32),
        queries=np.delete(packs.queries, np.arange(first, last)),
    )


def with_two_tails_swapped(plan) -> np.ndarray:
    """Exchange the rows of two tail segments in the plan's words, of one place and length where
    there are such; return the words themselves when there are no two tails."""
    from sgl_prefix_attn.kernels import layout as L

    first = int(plan.words[L.H_SEGMENTS])
    count = int(plan.words[L.H_NUM_SEGMENTS])
    segments = plan.words[first : first + count * L.SEGMENT_WORDS].reshape(-1, L.SEGMENT_WORDS)
    tail_at = int(plan.words[L.H_TAILS])
    tail_words = plan.words[tail_at : tail_at + plan.batch_size * L.TAIL_WORDS]
    starts = tail_words.reshape(-1, L.TAIL_WORDS)[:, L.T_DST]
    tails = np.flatnonzero(np.isin(segments[:, L.S_DST], starts))
    if tails.size < 2:
        return plan.words
    by_place: dict[tuple[int, int], list[int]] = {}
    for i in tails.tolist():
        place = (int(segments[i, L.S_START]), int(segments[i, L.S_LEN]))
        by_place.setdefault(place, []).append(i)
    same = [group for group in by_place.values() if len(group) > 1]
    a, b = (same[0] if same else tails.tolist())[:2]
    words = plan.words.copy()
    rows = [first + i * L.SEGMENT_WORDS + L.S_ROW for i in (a, b)]
    words[rows] = words[rows[::-1]]
    return words
