"""Policy: a pure function of facts; the reason always says what stood in the way."""

import dataclasses

import pytest

from sgl_prefix_attn.records import Decision, Prediction
from sgl_prefix_attn.step.policy import GAINS, HELD_LOSS, HOLD_STEPS, BatchFacts, decide


@pytest.mark.parametrize(
    ("facts", "decision"),
    [
        (BatchFacts(), Decision("prefix", "default")),
        (BatchFacts(policy="prefix"), Decision("prefix", "forced")),
        (BatchFacts(policy="stock"), Decision("stock", "forced")),
        (BatchFacts(tree="tree:LMCRadixCache"), Decision("stock", "tree:LMCRadixCache")),
        (BatchFacts(model="kv_dtype:x", tree="tree:y"), Decision("stock", "kv_dtype:x")),
        (BatchFacts(graph="graph_batch_size"), Decision("stock", "graph_batch_size")),
        (BatchFacts(graph="graph_x", tree="tree:y"), Decision("stock", "tree:y")),
        (BatchFacts(graph="graph_x", policy="stock"), Decision("stock", "forced")),
        # Forcing prefix does not force what cannot work.
        (BatchFacts(policy="prefix", graph="graph_x"), Decision("stock", "graph_x")),
        (BatchFacts(policy="prefix", tree="tree:y"), Decision("stock", "tree:y")),
    ],
)
def test_decisions(facts, decision):
    assert decide(facts) == decision
    assert decide(facts) == decide(dataclasses.replace(facts)), "equal facts, equal decision"


def at(gain, **facts):
    return decide(BatchFacts(predicted=Prediction(10.0 * gain, 10.0), **facts))


SHARING_GAIN, UNSHARED_GAIN = GAINS["measured"]
FASTER, SLOWER = Decision("prefix", "predicted_faster"), Decision("stock", "predicted_slower")


def test_the_less_was_measured_the_more_has_to_be_promised():
    sources = ("judged", "measured", "shipped", "scaled", "conservative")
    needed = [GAINS[source] for source in sources]
    assert needed == sorted(needed)
    for source, (sharing, unshared) in GAINS.items():
        assert sharing < unshared
        assert at(sharing, source=source) == FASTER
        assert at(sharing - 0.01, source=source) == SLOWER
        assert at(unshared, source=source, shares=False) == FASTER
        assert at(unshared - 0.005, source=source, shares=False) == SLOWER


def test_a_decision_says_what_it_rests_on():
    assert at(2.0).predicted == Prediction(20.0, 10.0)
    assert at(0.5).predicted == Prediction(5.0, 10.0)


@pytest.mark.parametrize("policy", ["prefix", "stock"])
def test_a_forced_policy_overrules_the_prediction(policy):
    assert at(2.0, policy=policy) == at(0.5, policy=policy) == Decision(policy, "forced")


def test_a_variant_is_held_for_some_steps_unless_that_costs_much():
    slightly = 1 + (HELD_LOSS - 1) / 2
    assert at(slightly, running="stock", steps=HOLD_STEPS - 1) == Decision("stock", "held")
    assert at(slightly, running="stock", steps=HOLD_STEPS) == FASTER
    assert at(HELD_LOSS, running="stock", steps=1) == Decision("stock", "held")
    assert at(HELD_LOSS + 0.01, running="stock", steps=1) == FASTER
    assert at(1 / slightly, running="prefix", steps=1) == Decision("prefix", "held")
    assert at(1 / (HELD_LOSS + 0.01), running="prefix", steps=1) == SLOWER
    assert at(slightly, running="prefix", steps=1) == FASTER, "nothing to hold against"


def test_what_serves_one_pass_must_save_what_its_plan_costs():
    assert at(2.0, least_saving_us=10.0) == FASTER
    little = at(2.0, least_saving_us=10.1)
    assert little == Decision("stock", "saves_too_little")
    assert little.predicted == Prediction(20.0, 10.0)
    assert at(0.5, least_saving_us=10.1) == SLOWER
    assert at(2.0, least_saving_us=10.1, policy="prefix") == Decision("prefix", "forced")
