"""Models with layers of several kinds, or latent KV, on engines with CUDA graphs: their layers of
full attention run plans, others SGLang's own kernels in the same step. Every second step is checked
by these, layer by layer; steps from graphs by outputs as near as those of two stock backends."""

import pytest
import torch

from eval.model_shapes import SHAPES
from tests.gpu import test_engines as plain_engines
from tests.gpu.test_configurations import CHECKS, PREFIX
from tests.gpu.test_engines import (
    ENGINE,
    MARGIN,
    NO_PREFILL_GRAPHS,
    NOISE,
    REFERENCE,
    TESTED,
    equal_share,
)
from tests.sglang.engine import Config, plain, result, run_all
from tests.support.tiny_models import write_tiny

pytestmark = plain_engines.pytestmark

# What a tensor-parallel rank has of a model but its experts.
_RANK = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    "rope_scaling",
)  # fmt: skip


def rank_of(shape: str) -> dict:
    return {name: SHAPES[shape][name] for name in _RANK}


STATES = {"max_mamba_cache_size": 96}
# Changes to the tiny model's config, engine arguments, the stock backend that it is compared with,
# which prefills for both, and another one.
KINDS = {
    "qwen3_next": (
        {"head_dim": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
        STATES, REFERENCE, NOISE,
    ),
    "lfm2": ({"head_dim": 64, "hidden_size": 512}, STATES, REFERENCE, "fa3"),
    "mellum": ({"head_dim": 128}, {}, "fa3", REFERENCE),
    "gemma3_text": ({"head_dim": 128, "query_pre_attn_scalar": 128}, {}, "fa3", NOISE),
    "gpt_oss": ({"head_dim": 64}, {"moe_runner_backend": "triton"}, "fa3", NOISE),
    "deepseek_v2": (
        {
            "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64,
            "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "v_head_dim": 128,
        },
        {}, "fa3", NOISE,
    ),
    "deepseek_v3": (rank_of("deepseek-v3/6-layers/tp8"), {}, "fa3", NOISE),
    "kimi_k2": (rank_of("kimi-k2/5-layers/tp8"), {}, "fa3", NOISE),
}  # fmt: skip
# Of the kinds of tiny models, where it has another name.
MODEL = {"kimi_k2": "deepseek_v3"}
# Of equal tokens, however few two stock backends share: of gpt_oss 0.14.
LEAST = 0.4
EACH = pytest.mark.parametrize("kind", KINDS)
SCENARIOS = plain("staggered", "late_prompt", "two_turns", "long_siblings")
FAULT = ("long_siblings", "shared_node_dropped")


@pytest.fixture(scope="module")
def engines(tmp_path_factory, request):
    """Folders of finished engines by kind and backend, of the kinds whose tests run; all start at
    once."""
    items = [item for item in request.session.items if item.path == request.path]
    wanted = {item.callspec.params["kind"] for item in items}
    folder = tmp_path_factory.mktemp("kinds")
    env = {"PREFIX_ATTN_CPU_PLATFORM": "0", "PREFIX_ATTN_POLICY": "prefix", **CHECKS}
    jobs = {}
    for kind in wanted:
        changes, own, stock, noise = KINDS[kind]
        engine = ENGINE | NO_PREFILL_GRAPHS | own
        model = write_tiny(folder / kind, MODEL.get(kind, kind), torch.bfloat16, **changes)
        for backend in (stock, noise):
            config = Config(kind, SCENARIOS, engine, env)
            jobs[folder / f"{kind}-{backend}"] = (config, backend, model)
        engine = engine | {"prefill_attention_backend": stock}
        config = Config(kind, (*SCENARIOS, FAULT), engine, env)
        jobs[folder / f"{kind}-{TESTED}"] = (config, TESTED, model)
    run_all(jobs)
    return folder


@EACH
def test_full_layers_run_plans(engines, kind):
    stock, noise, run = (
        result(engines / f"{kind}-{backend}") for backend in (*KINDS[kind][2:], TESTED)
    )
    steps = [step for key in SCENARIOS for step in run.steps[key]]
    assert {(step["variant"], step["reason"]) for step in steps} == {PREFIX}
    assert any(step["cross_check"] for step in steps)
    assert not any(step["mismatches"] for step in steps)
    siblings = [x for x in run.steps["long_siblings", ""] if x["nodes"] and len(x["requests"]) == 4]
    assert any(step["read"] < 0.6 * step["query_centric"] for step in siblings)
    assert all("cuda graph: True" in x.log for x in (stock, run))
    outputs, expected, others = (
        [tokens for key in SCENARIOS for tokens in x.outputs[key]] for x in (run, stock, noise)
    )
    share, allowed = equal_share(expected, outputs), equal_share(expected, others)
    print(f"{kind}: equal tokens {share:.4f}, two stock backends {allowed:.4f}")
    assert share >= max(allowed, LEAST) - MARGIN


@EACH
def test_a_planted_fault_is_found(engines, kind):
    run, stock = (result(engines / f"{kind}-{backend}") for backend in (TESTED, KINDS[kind][2]))
    right = stock.outputs["long_siblings", ""]
    found = (run.outputs[key] for key in (FAULT, ("long_siblings", "")))
    wrong, share = (equal_share(right, outputs) for outputs in found)
    print(f"{kind}: equal tokens {share:.4f}, with a fault {wrong:.4f}")
    assert wrong < share / 2
    mismatches = [step["mismatches"] for step in run.steps[FAULT]]
    assert mismatches[-1] > mismatches[0]
