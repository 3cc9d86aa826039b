"""How far to split long KV (PAT §6), by predicting when the last CTA finishes."""

from __future__ import annotations

import numpy as np
from numba import njit

# Longest item to try, in shares of the step's ideal time on one CTA: above 1 a few long items end
# late, below 1 there are more items and partial results than needed.
LONGEST = (0.26, 0.34, 0.51, 0.7, 0.85, 1.0, 1.15, 1.35)
# With this many rounds of items the queue balances by itself, and nothing is searched.
ROUNDS = 6


def choose_splits(
    job_time: np.ndarray,
    tickets: np.ndarray,
    most: np.ndarray,
    *,
    overhead: float,
    num_ctas: int,
) -> np.ndarray:
    """KV splits of each job, int64 [J].

    job_time  us that one CTA needs for the job's KV, unsplit
    tickets   items that each split of the job makes (row tiles * KV heads)
    most      largest number of splits that the job's length allows
    overhead  us of one CTA that every item costs besides

    Tries each longest-item target of LONGEST, predicts the finish of greedy longest-first
    scheduling over num_ctas CTAs, and takes the earliest.
    """
    return _choose(
        job_time, tickets, most, overhead, num_ctas, np.array(LONGEST), ROUNDS
    )


@njit(cache=True)
def _choose(job_time, tickets, most, overhead, num_ctas, longest, rounds):
    share = ((job_time + overhead) * tickets).sum() / num_ctas
    if tickets.sum() > rounds * num_ctas:
        return _splits(job_time, most, share)
    best = np.ones(job_time.size, np.int64)
    best_finish = np.inf
    for factor in longest:
        splits = _splits(job_time, most, share * factor)
        if (tickets * splits).sum() > 2 * rounds * num_ctas:
            continue
        finish = _finish(job_time / splits + overhead, tickets * splits, num_ctas)
        if finish < best_finish * 0.99:  # fewer partial results unless splitting clearly helps
            best, best_finish = splits, finish
    return best


@njit(cache=True)
def _splits(job_time, most, target):
    splits = np.empty(job_time.size, np.int64)
    for job in range(job_time.size):
        splits[job] = min(max(1, int(np.ceil(job_time[job] / target - 1e-6))), most[job])
    return splits


@njit(cache=True)
def _finish(item_time, count, num_ctas):
    """When the last CTA finishes if free CTAs always take the longest item left."""
    order = np.argsort(-item_time)
    free_at = np.zeros(num_ctas)  # sorted: CTAs by the time they are free
    for job in order:
        left = count[job]
        while left > 0:
            # CTAs free at the same earliest moment take items together
            same = 1
            while same < num_ctas and free_at[same] <= free_at[0] + 1e-9:
                same += 1
            taken = min(same, left)
            left -= taken
            until = free_at[0] + item_time[job]
            # insert `taken` CTAs that are free at `until`, keeping the order
            position = np.searchsorted(free_at, until, side="right")
            if position < taken:
                position = taken
            free_at[: position - taken] = free_at[taken:position].copy()
            free_at[position - taken : position] = until
    return free_at[-1]
