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
    "deterministic", (*plain(*NAMES, "scored"), *((name, FAULT) for name in NAMES)), ENGINE, ROWS
)

PLANNED = {"prefill_attention_backend": "prefix"}
SCORED = ("scored", "scored_beside_siblings")
PROMPTS = {
    chunk: Config(
        f"deterministic_prompts_{chunk}", (*plain(*SCORED), ("scored", FAULT)),
        ENGINE | PLANNED | {"chunked_prefill_size": chunk, "enable_mixed_chunk": chunk == 96},
        ROWS | {"PREFIX_ATTN_PREFILL": "1"},
    )
    for chunk in (96, 4096)
}  # fmt: skip


def same_in_prompts(outputs) -> None:
    """Check that tokens have the same bits in a prompt that is read whole or in chunks, with others
    or behind a cached prefix, and where they were generated."""
    alone, beside = (outputs[name, ""] for name in SCORED)
    assert len(alone["prompt"]) > 400 and len(alone["generated"]) == 24
    for found in (alone, beside):
        for name in ("prompt", "generated"):
            assert found[f"{name}_again"] == found[name] == alone[name], name
        assert found["end_behind"] == found["end"] and len(found["end"]) == 30
        assert found["follows"][0] == found["follows"][1]
    assert alone["cached"][2] > 300


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


@pytest.mark.parametrize("chunk", PROMPTS)
def test_a_token_has_the_same_bits_in_a_prompt_and_generated(engines, chunk):
    run = engines.run(PROMPTS[chunk])
    same_in_prompts(run.outputs)
    steps = [step for name in SCORED for step in run.steps[name, ""]]
    assert {(step["variant"], step["reason"]) for step in steps} == {("prefix", "forced")}
    prompts = [step["extend"] for step in steps if "extend" in step]
    assert any(len(lens) >= 3 for lens in prompts)
    assert max(map(sum, prompts)) <= 96 if chunk == 96 else max(map(sum, prompts)) > 400


def test_prompts_have_the_same_bits_whatever_a_chunk_is(engines):
    small, large = (engines.run(config).outputs["scored", ""] for config in PROMPTS.values())
    assert small == large


def test_stock_prompts_have_other_bits(deterministic):
    """So that it takes plans to pass."""
    found = deterministic.outputs["scored", ""]
    assert found["generated_again"] != found["generated"]


def test_a_fault_in_prompts_is_found(engines):
    for config in PROMPTS.values():
        found = engines.run(config).outputs["scored", FAULT]
        assert found["generated_again"] != found["generated"]


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
            "prompts run plans with PREFIX_ATTN_PREFILL=1",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_at_start(engines, name, engine, env, message):
    log = engines.failing(
        Config(f"not_deterministic_{name}", BOTH, {**ENGINE, **engine}, {**ROWS, **env})
    )
    assert "--enable-deterministic-inference cannot be served with `prefix`" in log
    assert message in log and "Load weight" not in log
