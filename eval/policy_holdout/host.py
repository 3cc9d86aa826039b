"""What the policy costs a decode step on the host, in microseconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

from eval import bench_plan
from eval.policy_holdout.looks import facts_without_plan
from sgl_prefix_attn.paths.radix_reader import RadixReader
from sgl_prefix_attn.paths.tree_reader import RunningBatch
from sgl_prefix_attn.plan import Planner
from sgl_prefix_attn.predict.predictor import Predictor
from sgl_prefix_attn.step.policy import decide

BATCH, _LEVELS = 256, 4
_CALLS, _STEPS = 1001, 51


def policy_us(predictor: Predictor, planner: Planner, calls: int = _CALLS) -> dict[str, float]:
    """Medians for BATCH requests below a tree of several levels:

    decide  the policy alone
    look    predict stock kernels and the least of any plan, and decide
    walk    read the paths that a look starts from
    steady  a whole step whose last look still stands
    """
    tree = bench_plan.tree_of(BATCH, _LEVELS)
    reqs = bench_plan.fake_requests(tree)
    cache = bench_plan.RadixCache()
    seq_lens = np.full(BATCH, tree.seq_len + 100)
    paths = RadixReader().read_paths(RunningBatch(reqs, cache, seq_lens, None))
    facts = facts_without_plan(predictor, paths)
    steps = bench_plan.measure(BATCH, _LEVELS, planner, _STEPS)
    return {
        "batch": BATCH,
        "decide": _median_us(lambda: decide(facts), calls),
        "look": _median_us(lambda: decide(facts_without_plan(predictor, paths)), calls),
        "walk": steps["walk"] * 1e3,
        "steady": steps["steady"] * 1e3,
    }


def _median_us(call: Callable[[], object], calls: int) -> float:
    call()
    times = []
    for _ in range(calls):
        start = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - start)
    return statistics.median(times) / 1e3
