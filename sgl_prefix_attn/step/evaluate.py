"""Everything that is decided about one decode batch, in one pure function.

The server, the policy's evaluation and `explain` call the same one.
"""

from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.records import PREFIX, Decision, Forest, PathTable, Prediction
from sgl_prefix_attn.step.policy import BatchFacts, decide


class StepPlanner(Protocol):
    """What the planners of all families of kernels offer: StepPlans, each of its family's class."""

    def plan_forest(self, forest: Forest) -> Any: ...


class TimePredictor(Protocol):
    """What the predictors of predict/predictor.py offer, each for the plans of one family of
    kernels; microseconds per layer."""

    source: str

    def stock(self, seq_lens: np.ndarray, unique: int) -> float: ...

    def prefix(self, plan: Any) -> float: ...


class Evaluation(NamedTuple):
    """One batch: the plan that was made for it, and which kernels run it."""

    plan: Any
    decision: Decision


def evaluate(
    paths: PathTable,
    facts: BatchFacts,
    planner: StepPlanner,
    predictor: TimePredictor | None = None,
    graph_rows: int = 0,
) -> Evaluation:
    """Build the forest, plan, predict both times and decide.

    facts       what is known of the batch besides its paths; times and sharing are filled in here
    predictor   of the planner's family; None: nothing is calibrated (on a CPU); a forced policy
                asks none either
    graph_rows  rows of the stock graph that the batch would replay; what it does not fill is
                padding of length 1

    Raises ValueError for paths that do not add up.
    """
    forest = build_forest(paths)
    plan = planner.plan_forest(forest)
    if predictor is not None and facts.policy != PREFIX:
        seq_lens = np.ones(max(paths.seq_lens.size, graph_rows), np.int64)
        seq_lens[: paths.seq_lens.size] = paths.seq_lens
        facts = replace(
            facts,
            predicted=Prediction(
                stock_us=predictor.stock(seq_lens, forest.unique_tokens),
                prefix_us=predictor.prefix(plan),
            ),
            source=predictor.source,
            shares=forest.parent.size > 0,
        )
    return Evaluation(plan, decide(facts))
