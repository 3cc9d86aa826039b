"""What a server that sees a batch for the first time predicts and decides about it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sgl_prefix_attn.plan import Planner
from sgl_prefix_attn.predict.predictor import Predictor, outlook
from sgl_prefix_attn.records import STOCK, Decision, PathTable, Prediction
from sgl_prefix_attn.step.policy import BatchFacts, decide


@dataclass(frozen=True)
class Look:
    """planned: whether the decision took a plan; `predicted` rests on one in either case."""

    predicted: Prediction
    decision: Decision
    planned: bool


def facts_without_plan(predictor: Predictor, paths: PathTable) -> BatchFacts:
    """Facts with the stock kernels' time and the least that any plan may take.

    The batch fills its graph: no padding rows. Nothing ran before, so nothing is held.
    """
    seen = outlook(predictor, paths, paths.seq_lens.size)
    return BatchFacts(predicted=seen.predicted, source=predictor.source, shares=seen.shares)


def look(predictor: Predictor, planner: Planner, paths: PathTable) -> Look:
    """As stepstate.StepPreparer decides its first step (tests/eval/test_policy_holdout.py)."""
    facts = facts_without_plan(predictor, paths)
    decision = decide(facts)
    planned = decision.variant != STOCK
    prefix_us = predictor.prefix(planner.plan(paths).work)
    predicted = replace(facts.predicted, prefix_us=prefix_us)
    if planned:
        decision = decide(replace(facts, predicted=predicted))
    return Look(predicted, decision, planned)
