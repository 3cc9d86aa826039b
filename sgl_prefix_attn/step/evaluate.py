"""Everything that is decided about one batch, in one pure function.

The server, the policy's evaluation and `explain` call the same one.
"""

from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.plan import Plan
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.records import PREFIX, STOCK, Decision, PathTable, Prediction
from sgl_prefix_attn.step.policy import BatchFacts, decide


class TimePredictor(Protocol):
    """Microseconds per layer of both kinds of kernels, where stock ones decode
    (predict/predictor.py) or prefill (predict/prefill_time.py); source: how sure they are, as
    step/policy.GAINS has it."""

    source: str

    def stock(
        self, seq_lens: np.ndarray, unique: int, query_lens: np.ndarray | None = None
    ) -> float: ...

    def prefix(self, plan: Plan) -> float: ...


class Evaluation(NamedTuple):
    """One batch: which kernels run it, and the plan that was made for it; None where the decision
    needed none."""

    plan: Any
    decision: Decision


def evaluate(
    paths: PathTable,
    facts: BatchFacts,
    planner: Planner,
    predictor: TimePredictor | None = None,
    graph_rows: int = 0,
    query_lens: np.ndarray | None = None,
    before: Plan | None = None,
) -> Evaluation:
    """Build the forest, plan, predict both times and decide.

    facts       what is known of the batch besides its paths; times and sharing are filled in here
    predictor   of the planner's kernels; None: nothing is calibrated (on a CPU); a forced policy
                asks none either
    graph_rows  rows of the stock graph that the batch would replay; what it does not fill is
                padding of length 1
    query_lens  int32 [B] new tokens of each request; None: one each, a decode step
    before      the plan that the same requests have outgrown

    Raises ValueError for paths that do not add up.
    """
    forest = build_forest(paths, query_lens)
    facts = replace(facts, shares=forest.parent.size > 0, several=query_lens is not None)
    if facts.several and (decision := decide(facts)).variant == STOCK:
        return Evaluation(None, decision)
    plan = planner.plan_forest(forest, before)
    if predictor is not None and facts.policy != PREFIX:
        seq_lens = np.ones(max(paths.seq_lens.size, graph_rows), np.int64)
        seq_lens[: paths.seq_lens.size] = paths.seq_lens
        facts = replace(
            facts,
            predicted=Prediction(
                stock_us=predictor.stock(seq_lens, forest.unique_tokens, query_lens),
                prefix_us=predictor.prefix(plan),
            ),
            source=predictor.source,
        )
    return Evaluation(plan, decide(facts))
