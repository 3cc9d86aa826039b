"""Engines with speculative decoding on a Hopper GPU: chains are drafted and verified over plans, in
graphs.

The draft model is the target itself, of whose drafts SGLang accepts about half, stock or not:
lengths move by one to four tokens a step. An EAGLE layer drafts in engines of its own.
"""

from itertools import pairwise

import pytest

from eval.model_shapes import write_config
from tests.gpu import test_extend_engines
from tests.gpu.test_engines import (
    ENGINE,
    MARGIN,
    NOISE,
    REFERENCE,
    TESTED,
    equal_share,
    first_alone,
    prefix_graphs,
    share,
)
from tests.sglang.engine import Config, plain, run_together

pytestmark = test_extend_engines.pytestmark

SCENARIOS = plain("staggered", "siblings", "two_turns", "crowd")
TOKENS = 4
EAGLE, DECODE = "eagle", "decode"
CHAINS = {
    "speculative_num_steps": TOKENS - 1,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": TOKENS,
}
PLANNED = {"prefill_attention_backend": TESTED}


def config(name, scenarios, env=None, **engine) -> Config:
    env = {
        "PREFIX_ATTN_CPU_PLATFORM": "0",
        "PREFIX_ATTN_POLICY": "prefix",
        "PREFIX_ATTN_PREFILL": "1",
    } | (env or {})
    return Config(f"verify-{name}", scenarios, ENGINE | engine, env)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def runs(folder):
    """Two stock engines, of which one drafts, too, and one that verifies over plans."""
    drafts = CHAINS | {
        "speculative_algorithm": "STANDALONE",
        "speculative_draft_model_path": str(folder / "model"),
    }
    faults = ("swap_chains", "draft_node_dropped", "alternate")
    faulty = (*SCENARIOS, *(("siblings", fault) for fault in faults))
    jobs = {
        REFERENCE: (config(REFERENCE, SCENARIOS, **drafts), REFERENCE),
        NOISE: (config(NOISE, SCENARIOS), NOISE),
        TESTED: (config(TESTED, faulty, **drafts, **PLANNED), TESTED),
    }
    return first_alone(jobs, folder)


@pytest.fixture(scope="module")
def others(runs, folder):
    """Engines that verify drafts of an EAGLE layer with random weights, one of them behind a
    prefill backend of SGLang's."""
    layer = write_config(
        folder / "draft", "tiny", architectures=["LlamaForCausalLMEagle"], num_hidden_layers=1,
        hidden_size=512, intermediate_size=1024, head_dim=128,
    )  # fmt: skip
    eagle = CHAINS | {
        "speculative_algorithm": "EAGLE",
        "speculative_draft_model_path": str(layer),
        "speculative_draft_load_format": "dummy",
    }
    no_variable = {"PREFIX_ATTN_PREFILL": "0"}
    checks = {"PREFIX_ATTN_CHECK": "1", "PREFIX_ATTN_CHECK_EVERY": "4"}
    decode = {
        "prefill_attention_backend": "fa3",
        "speculative_attention_mode": "decode",
        "speculative_draft_attention_backend": "flashinfer",
    }
    alternate = ("siblings", "alternate")
    jobs = {
        EAGLE: (config(EAGLE, SCENARIOS, checks, **eagle, **PLANNED), TESTED),
        DECODE: (config(DECODE, (*SCENARIOS, alternate), no_variable, **eagle, **decode), TESTED),
    }
    return run_together(jobs, folder / "model", folder)


def verified(run, key) -> list[dict]:
    steps = [step for step in run.steps[key] if "extend" in step]
    return [step for step in steps if set(step["extend"]) == {TOKENS}]


def drafted(run, key) -> list[dict]:
    """Rounds of draft steps: the target model never decodes."""
    return [step for step in run.steps[key] if "extend" not in step]


def planned_but_the_first(steps) -> bool:
    """Beside FlashAttention 3, the first round waits for no lengths, and so runs no plan."""
    decisions = [(step["variant"], step["reason"]) for step in steps]
    return decisions == [("stock", "lengths_awaited")] + [("prefix", "forced")] * len(decisions[1:])


def test_outputs_are_as_equal_as_those_of_two_stock_backends(runs):
    noise, tested = share(runs, NOISE, SCENARIOS), share(runs, TESTED, SCENARIOS)
    print(f"equal tokens: {REFERENCE}/{TESTED} {tested:.4f}, {REFERENCE}/{NOISE} {noise:.4f}")
    assert tested >= noise - MARGIN


def test_chains_were_verified_over_plans_in_graphs(runs):
    run = runs[TESTED]
    assert prefix_graphs(run.log) == [len(ENGINE["cuda_graph_bs_decode"])] * 2  # drafts have theirs
    assert planned_but_the_first([step for key in SCENARIOS for step in verified(run, key)])
    several = [step for step in verified(run, ("siblings", "")) if len(step["extend"]) == 4]
    # Not all: a plan as small as these may read a prompt once per request, side by side.
    assert any(step["read"] < step["query_centric"] for step in several)
    tokens = sum(map(len, run.outputs["siblings", ""]))
    steps = sum(len(step["extend"]) for step in verified(run, ("siblings", "")))
    assert steps < tokens, "more than one token is accepted a step"


def test_swapped_chains_are_found(runs):
    """Wrong verification accepts other tokens."""
    noise = share(runs, NOISE, plain("siblings"))
    stock = runs[REFERENCE].outputs["siblings", ""]
    assert equal_share(stock, runs[TESTED].outputs["siblings", "swap_chains"]) < noise - MARGIN


def test_draft_steps_ran_plans_in_graphs(runs):
    """Beside the backend that SGLang drafts with on Hopper, though none was asked for."""
    run = runs[TESTED]
    assert "decode steps of the draft model run plans" in run.log
    assert "Overriding draft attention backend to fa3" in run.log
    assert planned_but_the_first([step for key in SCENARIOS for step in drafted(run, key)])


def test_wrong_plans_of_draft_steps_are_found(runs):
    """Drafts that do not see the prompt are accepted less often: more rounds, and by far more than
    stock kernels in every other round change; outputs stay right."""
    run, fault = runs[TESTED], ("siblings", "draft_node_dropped")
    right, alternate, wrong = (
        sum(len(step["requests"]) for step in drafted(run, key))
        for key in (("siblings", ""), ("siblings", "alternate"), fault)
    )
    print(f"rounds of requests: {right}, {alternate} with every other stock, {wrong} with a fault")
    assert wrong - right > 2 * abs(alternate - right)
    noise = share(runs, NOISE, plain("siblings"))
    stock = runs[REFERENCE].outputs["siblings", ""]
    assert equal_share(stock, run.outputs[fault]) >= noise - MARGIN


def test_stock_and_prefix_rounds_alternate_on_draft_graphs(runs):
    variants = [step["variant"] for step in drafted(runs[TESTED], ("siblings", "alternate"))]
    assert len(variants) > 4 and all(a != b for a, b in pairwise(variants))


def test_the_decode_backend_verifies_behind_another_prefill_backend(runs, others):
    """And drafts beside FlashInfer, for which every round waits for its lengths."""
    run = others[DECODE]
    for steps in (verified, drafted):
        assert {step["variant"] for key in SCENARIOS for step in steps(run, key)} == {"prefix"}
    assert "plans serve verify batches" in run.log
    noise = share(runs, NOISE, SCENARIOS)
    assert share(runs | others, DECODE, SCENARIOS) >= noise - MARGIN
    variants = [step["variant"] for step in drafted(run, ("siblings", "alternate"))]
    assert len(variants) > 4 and all(a != b for a, b in pairwise(variants))


def test_eagle_drafts_whose_tree_has_bigrams_pass_the_checks(runs, others):
    """Of paths and slots in each step, and of layers against stock attention in every fourth."""
    steps = [step for key in SCENARIOS for step in verified(others[EAGLE], key)]
    rounds = [step for key in SCENARIOS for step in drafted(others[EAGLE], key)]
    assert planned_but_the_first(steps) and planned_but_the_first(rounds)
    assert any(step["cross_check"] for step in steps) and steps[-1]["mismatches"] == 0
    assert any(step["cross_check"] for step in rounds)
    assert "prefix and stock attention differ" not in others[EAGLE].log
    noise = share(runs, NOISE, SCENARIOS)
    assert share(runs | others, EAGLE, SCENARIOS) >= noise - MARGIN
