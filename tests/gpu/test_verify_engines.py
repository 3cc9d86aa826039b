"""Engines with speculative decoding on a Hopper GPU: chains are verified over plans, in graphs.

The draft model is the target itself, so that nearly every draft is accepted and lengths move by
several tokens a step; it runs stock kernels. N-grams are drafted in an engine of their own.
"""

import pytest

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
from tests.sglang.engine import Config, plain

pytestmark = test_extend_engines.pytestmark

SCENARIOS = plain("staggered", "siblings", "two_turns", "crowd")
TOKENS = 4
NGRAM = "ngram"
REPEATED = plain("siblings", "repeated")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two stock engines, of which one drafts, too, and two that verify over plans."""
    folder = tmp_path_factory.mktemp("engines")
    drafts = {
        "speculative_algorithm": "STANDALONE",
        "speculative_draft_model_path": str(folder / "model"),
        "speculative_num_steps": TOKENS - 1,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": TOKENS,
    }
    ngrams = {
        "speculative_algorithm": "NGRAM",
        "speculative_ngram_max_bfs_breadth": 1,
        "speculative_num_draft_tokens": TOKENS,
    }

    def config(name, scenarios=SCENARIOS, **engine):
        env = {
            "SGL_PREFIX_ATTN_CPU_PLATFORM": "0",
            "SGL_PREFIX_ATTN_POLICY": "prefix",
            "SGL_PREFIX_ATTN_PREFILL": "1",
        }
        return Config(f"verify-{name}", scenarios, ENGINE | engine, env)

    faulty = (*SCENARIOS, ("siblings", "swap_chains"))
    jobs = {
        REFERENCE: (config(REFERENCE, **drafts), REFERENCE),
        NOISE: (config(NOISE), NOISE),
        TESTED: (config(TESTED, faulty, **drafts, prefill_attention_backend=TESTED), TESTED),
        NGRAM: (config(NGRAM, REPEATED, **ngrams, prefill_attention_backend=TESTED), TESTED),
    }
    return first_alone(jobs, folder)


def verified(run, key) -> list[dict]:
    steps = [step for step in run.steps[key] if "extend" in step]
    return [step for step in steps if set(step["extend"]) == {TOKENS}]


def test_outputs_are_as_equal_as_those_of_two_stock_backends(runs):
    noise, tested = share(runs, NOISE, SCENARIOS), share(runs, TESTED, SCENARIOS)
    print(f"equal tokens: {REFERENCE}/{TESTED} {tested:.4f}, {REFERENCE}/{NOISE} {noise:.4f}")
    assert tested >= noise - MARGIN


def test_chains_were_verified_over_plans_in_graphs(runs):
    run = runs[TESTED]
    assert prefix_graphs(run.log) == [len(ENGINE["cuda_graph_bs_decode"])]
    for key in SCENARIOS:
        assert {step["variant"] for step in verified(run, key)} == {"prefix"}, key
    several = [step for step in verified(run, ("siblings", "")) if len(step["extend"]) == 4]
    assert several and all(step["read"] < step["query_centric"] for step in several)
    tokens = sum(map(len, run.outputs["siblings", ""]))
    steps = sum(len(step["extend"]) for step in verified(run, ("siblings", "")))
    assert steps < tokens, "more than one token is accepted a step"


def test_swapped_chains_are_found(runs):
    """Wrong verification accepts other tokens."""
    noise = share(runs, NOISE, plain("siblings"))
    stock = runs[REFERENCE].outputs["siblings", ""]
    assert equal_share(stock, runs[TESTED].outputs["siblings", "swap_chains"]) < noise - MARGIN


def test_the_draft_model_runs_stock_kernels(runs):
    """Though none were asked for: SGLang drafts with backends that it knows."""
    log = runs[TESTED].log
    assert "the draft model runs stock kernels (draft_model)" in log
    assert f"Overriding draft attention backend to {REFERENCE}" in log


def test_ngrams_that_are_chains_are_verified_over_plans(runs):
    """At first nothing is foretold, and drafts filled up with siblings are trees; the second time
    the four requests say what they said, as near as bf16 has it."""
    run, key = runs[NGRAM], ("repeated", "")
    found = {(step["variant"], step["reason"]) for step in verified(run, key)}
    assert found == {("prefix", "forced"), ("stock", "verify_tree")}
    noise = share(runs, NOISE, plain("siblings"))
    stock = runs[REFERENCE].outputs["siblings", ""]
    assert share(runs, NGRAM, plain("siblings")) >= noise - MARGIN
    assert equal_share(stock + stock, run.outputs[key]) >= noise - MARGIN
