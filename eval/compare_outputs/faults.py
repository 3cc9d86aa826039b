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
    from sgl_prefix_attn.plan import row_tile_planner

    make_packs, make_tiles = plan.make_packs, row_tile_planner.make_tiles

    def faulty(*args):
        packs = make_packs(*args)
        changed = without_largest_shared(packs)
        if changed is not packs:
            planted()
        return changed

    def faulty_tiles(forest, *args):
        changed = with_largest_node_empty(forest)
        if changed is not forest:
            planted()
        return make_tiles(changed, *args)

    plan.make_packs, row_tile_planner.make_tiles = faulty, faulty_tiles


def _swap_tails(planted: Callable[[], None]) -> None:
    """Read two requests' private tails from each other's slots."""
    from sgl_prefix_attn.plan import Planner, row_tile_planner

    plan, make_tiles = Planner.plan_forest, row_tile_planner.make_tiles

    def faulty(self, forest):
        good = plan(self, forest)
        words = with_two_tails_swapped(good)
        if words is good.words:
            return good
        planted()
        return replace(good, words=words)

    def faulty_tiles(forest, *args):
        good = make_tiles(forest, *args)
        run = with_two_tail_runs_swapped(forest, good.run)
        if run is good.run:
            return good
        planted()
        return replace(good, run=run)

    Planner.plan_forest, row_tile_planner.make_tiles = faulty, faulty_tiles


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


def with_largest_node_empty(forest):
    """Take all tokens from the node with the most queries; the same object without a node."""
    if not forest.parent.size:
        return forest
    lost = np.argmax(forest.num_queries)
    start = forest.start.copy()
    start[lost] = forest.end[lost]
    return replace(forest, start=start)


def with_two_tail_runs_swapped(forest, run) -> np.ndarray:
    """Exchange the requests of two tails among the runs of row tiles, of one place and length where
    there are such; return the runs themselves when there are no two. A small batch is read request
    by request: then a run holds a shared node and the tail below it."""
    from sgl_prefix_attn.plan.row_tiles import R_LEN, R_REQUEST, R_START

    begins, start = run[:, R_START], forest.tail_start[run[:, R_REQUEST]]
    tails = np.flatnonzero((begins <= start) & (start < begins + run[:, R_LEN]))
    pair = _two_alike(tails, run[tails][:, [R_START, R_LEN]])
    if pair is None:
        return run
    changed = run.copy()
    changed[pair, R_REQUEST] = run[pair[::-1], R_REQUEST]
    return changed


def _two_alike(tails: np.ndarray, places: np.ndarray) -> list[int] | None:
    """Choose two tails, of one of the places [n, 2] if there are such; None of fewer than two."""
    if tails.size < 2:
        return None
    by_place: dict[tuple[int, int], list[int]] = {}
    for i, (start, length) in zip(tails.tolist(), places.tolist(), strict=True):
        by_place.setdefault((start, length), []).append(i)
    same = [group for group in by_place.values() if len(group) > 1]
    return (same[0] if same else tails.tolist())[:2]


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
    pair = _two_alike(tails, segments[tails][:, [L.S_START, L.S_LEN]])
    if pair is None:
        return plan.words
    words = plan.words.copy()
    rows = [first + i * L.SEGMENT_WORDS + L.S_ROW for i in pair]
    words[rows] = words[rows[::-1]]
    return words
