"""Options that SGLang's users start servers with, each on an engine: steps run prefix kernels, or
stock ones for the reason that docs/sglang-integration.md names; outputs as near as those of two
stock backends.
"""

from pathlib import Path

import pytest
import torch

from eval.model_shapes import LLAMA, SHAPES
from eval.tiny_model import write_tiny_llama
from tests.gpu import test_engines as plain_engines
from tests.gpu.test_engines import ENGINE, MARGIN, NOISE, REFERENCE, SAME_PREFILL, TESTED
from tests.sglang.engine import Config, plain, result, run_all
from tests.support.lora import write_adapters

pytestmark = plain_engines.pytestmark

E4M3 = "e4m3_kv"
CHANGES = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 128}
PREFIX = ("prefix", "forced")
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
# A pool so small that KV has to leave the device.
HICACHE = {"enable_hierarchical_cache": True, "hicache_ratio": 4.0, "max_total_tokens": 640}
CHECKS = {"PREFIX_ATTN_CHECK": "1", "PREFIX_ATTN_CHECK_EVERY": "2"}
LIKE_STOCK = ("siblings", "loaded_back")  # what two stock backends are compared by
NO_FUSED_REDUCE = {"enforce_disable_flashinfer_allreduce_fusion": True}

# Name: engine arguments, scenario, what each step is, marks.
OPTIONS = {
    "head_dim_256": ({}, "siblings", PREFIX),
    "lora": ({"enable_lora": True, "max_loras_per_batch": 3}, "adapters", PREFIX),
    E4M3: ({"kv_cache_dtype": "fp8_e4m3"}, "siblings", PREFIX),
    "chunked_prefill_off": ({"chunked_prefill_size": -1}, "siblings", PREFIX),
    "hicache": (HICACHE, "loaded_back", PREFIX),
    "hicache_write_back": (
        HICACHE | {"hicache_write_policy": "write_back", "page_size": 16}, "loaded_back", PREFIX,
    ),
    "torch_compile": (
        {"enable_torch_compile": True, "torch_compile_max_bs": 2}, "siblings",
        ("stock", "torch_compile"),
    ),
    "sleep_and_wake": ({"enable_memory_saver": True}, "slept", PREFIX),
    "update_weights": ({}, "updated", PREFIX),
    "disaggregated_decode": (
        {"disaggregation_mode": "decode", "disaggregation_transfer_backend": "fake"},
        "handed_over", PREFIX,
    ),
    "data_parallel": ({"dp_size": 2}, "siblings", PREFIX),
    "pipeline_parallel": ({"pp_size": 2}, "siblings", ("stock", "parallel:pipeline")),
    "dp_attention": (
        {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True} | NO_FUSED_REDUCE, "siblings",
        ("stock", "parallel:dp_attention"),
    ),
}  # fmt: skip
# In check mode: every path, and each second step by both kernels.
CHECKED = ("hicache_write_back", E4M3)
# SGLang's Llama has no data-parallel attention: its layers take as many heads as without.
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
ON_TWO_GPUS = ("data_parallel", "pipeline_parallel", "dp_attention")


@pytest.fixture(scope="module")
def engines(tmp_path_factory, request):
    """Folders of finished engines by (option, backend), of the options whose tests run; all start
    at once, after one that compiles FlashInfer."""
    items = [item for item in request.session.items if item.path == Path(__file__)]
    wanted = {item.callspec.params["option"] for item in items}
    folder = tmp_path_factory.mktemp("configurations")
    model = write_tiny_llama(folder / "model", **CHANGES)
    models = {
        "dp_attention": write_tiny_llama(folder / "qwen3", **CHANGES, **QWEN3),
        "head_dim_256": write_tiny_llama(folder / "wide", **(CHANGES | {"head_dim": 256})),
    }
    config = LLAMA | SHAPES["tiny"] | CHANGES
    adapters = {"lora_paths": write_adapters(folder / "adapters", config)}
    env = {"PREFIX_ATTN_CPU_PLATFORM": "0", "PREFIX_ATTN_POLICY": "prefix"}
    # Engines that share GPUs find unlike parts of them free.
    env |= {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}
    jobs = {}
    if wanted - {E4M3}:
        for b in (REFERENCE, NOISE):
            jobs["plain", b] = Config("plain", plain(*LIKE_STOCK), ENGINE, env)
    if E4M3 in wanted:  # rounded KV differs by more than KV that is not
        engine = ENGINE | OPTIONS[E4M3][0]
        jobs[E4M3, NOISE] = Config(E4M3, plain("siblings"), engine, env)
    for name, (arguments, scenario, _) in OPTIONS.items():
        if name not in wanted or (name in ON_TWO_GPUS and torch.cuda.device_count() < 2):
            continue
        engine = ENGINE | arguments | (adapters if name == "lora" else {})
        checks = CHECKS if name in CHECKED else {}
        for backend in (REFERENCE, TESTED):
            prefill = SAME_PREFILL if backend == TESTED else {}
            # With data-parallel attention ports are counted from this one.
            engine["port"] = 30000 + 100 * len(jobs)
            jobs[name, backend] = Config(name, plain(scenario), engine | prefill, env | checks)
    every = [
        (folder / f"{name}-{backend}", (config, backend, models.get(name, model)))
        for (name, backend), config in jobs.items()
    ]
    run_all(dict(every[:1]))
    run_all(dict(every[1:]))
    return folder


def of(option, backend, engines):
    return result(engines / f"{option}-{backend}")


def noise(engines, option, scenario):
    """Equal tokens of two stock backends."""
    option = option if option == E4M3 else "plain"
    scenario = scenario if scenario in LIKE_STOCK else "siblings"
    stock, other = (of(option, b, engines).outputs[scenario, ""] for b in (REFERENCE, NOISE))
    return plain_engines.equal_share(stock, other)


@pytest.mark.parametrize(
    "option", [pytest.param(o, marks=TWO_GPUS if o in ON_TWO_GPUS else ()) for o in OPTIONS]
)
def test_an_option(engines, option):
    _, scenario, expected = OPTIONS[option]
    run = of(option, TESTED, engines)
    steps = run.steps[scenario, ""]
    assert {(step["variant"], step["reason"]) for step in steps} == {expected}
    if scenario == "loaded_back":
        assert steps[-1]["loaded"] > 0, "the device had room for all"
    if option in CHECKED:
        assert steps[-1]["mismatches"] == 0 and any(step["cross_check"] for step in steps)
    if option == "disaggregated_decode":
        return  # no KV has come: outputs mean nothing
    stock = of(option, REFERENCE, engines).outputs[scenario, ""]
    share = plain_engines.equal_share(stock, run.outputs[scenario, ""])
    allowed = noise(engines, option, scenario)
    print(f"{option}: equal tokens {share:.4f}, two stock backends {allowed:.4f}")
    assert share >= allowed - MARGIN
    if expected == PREFIX:
        assert any(step["nodes"] for step in steps), "no step shared KV"
