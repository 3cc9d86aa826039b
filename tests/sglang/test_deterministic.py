"""Deterministic inference over plans, on real CPU engines: log-probabilities are the same bits."""

import pytest

from tests.sglang.engine import Config, plain

pytestmark = [pytest.mark.engine, pytest.mark.long]

ENGINE = {"enable_deterministic_inference": True}
ROWS = {"PROBE_ROWS": "1"}
BOTH = plain("by_itself", "beside_siblings")
FAULT = "maxima_of_the_item"
NAMES = ("by_itself", "beside_siblings", "rollouts")
DETERMINISTIC = Config(
    "deterministic", (*plain(*NAMES), *((name, FAULT) for name in NAMES)), ENGINE, ROWS
)


@pytest.fixture(scope="module")
def deterministic(engines):
    return engines.run(DETERMINISTIC)


def test_a_requests_log_probabilities_do_not_depend_on_others(deterministic):
    alone, beside = (deterministic.outputs[name, ""] for name, _ in BOTH)
    assert len(alone) == 70 and alone == beside


def test_every_step_runs_a_plan_and_requests_decode_together(deterministic):
    steps = deterministic.steps["beside_siblings", ""]
    assert {(step["variant"], step["reason"]) for step in steps} == {("prefix", "forced")}
    assert max(len(step["requests"]) for step in steps) >= 3
    assert any(step["read"] and step["read"] < step["query_centric"] for step in steps)


def test_the_rollouts_of_the_example_are_the_same_in_other_company(deterministic):
    found = deterministic.outputs["rollouts", ""]
    assert found["differences"] == []
    assert [len(text) for text in found["texts"]] == [n for n in (3, 6, 9, 12, 3) for _ in range(3)]
    assert len(set(map(tuple, found["texts"]))) == 15, "each has a seed of its own"
    steps = deterministic.steps["rollouts", ""]
    assert {step["variant"] for step in steps} == {"prefix"}
    assert max(len(step["requests"]) for step in steps) > 10


def test_a_planted_fault_is_found(deterministic):
    """Rows of an item that are rescaled together."""
    alone, beside = (deterministic.outputs[name, FAULT] for name, _ in BOTH)
    assert len(alone) == len(beside) == 70 and alone != beside
    assert deterministic.outputs["rollouts", FAULT]["differences"]


@pytest.mark.parametrize(
    ("name", "engine", "env", "message"),
    [
        ("stock", {}, {"PREFIX_ATTN_POLICY": "stock"}, "PREFIX_ATTN_POLICY=stock runs no plans"),
        ("naive", {}, {"PREFIX_ATTN_STRATEGY": "naive"}, "PREFIX_ATTN_STRATEGY=naive splits"),
        (
            "prefill", {"prefill_attention_backend": "prefix"}, {},
            "prompts over plans are not deterministic",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_at_start(engines, name, engine, env, message):
    log = engines.failing(
        Config(f"not_deterministic_{name}", BOTH, {**ENGINE, **engine}, {**ROWS, **env})
    )
    assert "--enable-deterministic-inference cannot be served with `prefix`" in log
    assert message in log and "Load weight" not in log
