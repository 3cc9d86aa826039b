"""Models of which no batch can run a plan are served by what SGLang would have chosen."""

import json
import logging
from types import SimpleNamespace

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.model_executor.model_runner_components.attention_backend_setup import (
    AttentionBackends,
)

from sgl_prefix_attn.engine import fallback, sglang_config, stock_alone
from sgl_prefix_attn.engine.runner_backend import find_backend, find_observer
from sgl_prefix_attn.patches import batch_requests, built_backends
from sgl_prefix_attn.plugin import entry_point, versions
from sgl_prefix_attn.records import Decision
from sgl_prefix_attn.settings import Settings
from tests.sglang.conftest import Engines
from tests.sglang.engine import Config, plain
from tests.sglang.fake_server import Server, Stock
from tests.support.tiny_models import write_tiny_olmo3

# --- what SGLang's arguments say on a Hopper GPU -------------------------------------------------

HOPPER = {
    "is_cuda": True, "is_hip": False, "is_sm90": True, "is_sm100": False, "is_sm120": False,
    "is_blackwell": False, "device_sm": 90, "is_hopper_with_cuda_12_3": True,
    "has_flashinfer": True,
}  # fmt: skip
# Model type of transformers, architecture, what a released model has and its default config lacks,
# and what SGLang chooses; plain Llama for control.
MODELS = {
    "llama": ("LlamaForCausalLM", {}, "fa3"),
    "llama4_text": ("Llama4ForCausalLM", {}, "fa3"),  # chunks
    "mimo_v2_flash": (  # windows and sinks
        "MiMoV2FlashForCausalLM",
        {"hybrid_layer_pattern": 8 * [0, 1, 1, 1, 1, 1], "add_swa_attention_sink_bias": True},
        "fa3",
    ),
    "exaone4": ("Exaone4ForCausalLM", {}, "fa3"),  # windows
    "gpt_oss": ("GptOssForCausalLM", {}, "fa3"),  # windows and sinks
    "gemma4": ("Gemma4ForConditionalGeneration", {}, "triton"),  # layers with unlike heads
    "gemma3_text": ("Gemma3ForCausalLM", {}, "fa3"),  # windows
    "qwen3_next": ("Qwen3NextForCausalLM", {}, "fa3"),  # linear attention
    "deepseek_v3": ("DeepseekV3ForCausalLM", {"moe_layer_freq": 1}, "fa3"),  # latent attention
}
WITHOUT_EXAONE4 = ("0.5.19", "0.5.20", "0.5.21")
ASKED = (
    {"attention_backend": "prefix"},
    {"decode_attention_backend": "prefix"},
    {"attention_backend": "prefix", "prefill_attention_backend": "prefix"},
)


@pytest.fixture
def resolve(tmp_path, monkeypatch):
    """Resolve the arguments of a server for a model type on a Hopper GPU."""
    if not hasattr(runtime_context, "override_platform"):
        pytest.skip("from SGLang 0.5.20 on another GPU can be named")
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils import common
    from transformers import CONFIG_MAPPING, AutoConfig

    entry_point.register()
    HookRegistry.apply_hooks()
    monkeypatch.setattr(common, "get_device_memory_capacity", lambda *_: 80 * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))

    def resolved(model_type, **options):
        if model_type not in CONFIG_MAPPING:
            pytest.skip(f"this SGLang's transformers does not know {model_type}")
        if model_type == "exaone4" and versions.installed().version in WITHOUT_EXAONE4:
            pytest.skip("this SGLang picks no backend for Exaone 4 and stops")
        architecture, changes, _ = MODELS[model_type]
        config = AutoConfig.for_model(model_type).to_dict() | changes
        config["architectures"] = [architecture]
        (tmp_path / "config.json").write_text(json.dumps(config, default=str))
        args = ServerArgs(
            model_path=str(tmp_path), device="cuda", skip_tokenizer_init=True,
            mem_fraction_static=0.8, **options,
        )  # fmt: skip
        with runtime_context.override_platform(**HOPPER):
            args.resolve_once()
        return args

    return resolved


@pytest.mark.parametrize("model_type", MODELS)
def test_prefix_changes_nothing_that_sglang_chooses_for_a_model(resolve, model_type):
    expected = MODELS[model_type][-1]
    assert sglang_config.attention_backends(resolve(model_type)) == (expected, expected)
    for asked in ASKED:
        args = resolve(model_type, **asked)
        prefill = asked.get("prefill_attention_backend", expected)
        assert sglang_config.default_backend(args) == expected
        assert sglang_config.attention_backends(args) == (prefill, "prefix")


@pytest.mark.parametrize(("chosen", "has"), [(None, True), ("triton", False)])
def test_cached_prefixes_are_expanded_in_chunks_where_sglangs_choice_can(resolve, chosen, has):
    """By SGLang's gate, which goes by the name of the prefill backend."""
    asked = {"attention_backend": chosen, "decode_attention_backend": "prefix"}
    args = resolve("deepseek_v3", prefill_attention_backend="prefix", **asked)
    assert sglang_config.attention_backends(args) == ("prefix", "prefix")
    assert sglang_config.has_chunked_prefix_cache("prefix")
    assert sglang_config.options(args).disable_chunked_prefix_cache is not has


def test_a_prefill_backend_that_a_model_accepts_may_be_named_beside_prefix(resolve):
    args = resolve("gpt_oss", prefill_attention_backend="triton", decode_attention_backend="prefix")
    assert sglang_config.attention_backends(args) == ("triton", "prefix")
    assert sglang_config.default_backend(args) == "fa3"


def test_another_backend_that_a_model_cannot_run_is_still_refused(resolve):
    with pytest.raises(AssertionError, match="GptOssForCausalLM"):
        resolve("gpt_oss", attention_backend="flashinfer", decode_attention_backend="prefix")


# --- which runners are served so -----------------------------------------------------------------


@pytest.fixture
def world(monkeypatch):
    """A server whose backend could run plans, and SGLang's own under the name `chosen`."""
    server = Server(monkeypatch)
    server.runner.prefix_attn_steps = None
    server.runner.server_args.attention_backend = "chosen"
    monkeypatch.setitem(fallback.ATTENTION_BACKENDS, "chosen", lambda runner: Stock([]))
    return server


def test_a_model_without_a_layer_for_plans_is_served_by_sglangs_choice(world, caplog):
    caplog.set_level(logging.WARNING)
    runner, settings = world.runner, Settings()
    assert stock_alone.why_stock_alone(runner, settings) is None
    world.layer.sliding_window_size = 16
    reason = stock_alone.why_stock_alone(runner, settings)
    assert reason == "layers:sliding_window"
    runner.attn_backend = stock_alone.serve_alone(runner, settings, reason)
    assert type(runner.attn_backend) is Stock
    (line,) = caplog.messages
    assert line.endswith("every step runs SGLang's own chosen (layers:sliding_window)")
    # Its steps are counted, also behind a wrapper; no other hook finds it.
    runner.attn_backend = SimpleNamespace(full=runner.attn_backend)
    assert find_backend(runner) is None
    schedule = SimpleNamespace(reqs=world.world.reqs, tree_cache=world.world.cache)
    for grown in (1, 2):
        batch_requests.hook(world.batch(grown), None, schedule, runner)
    steps = find_observer(runner)
    assert steps.counters.steps == {Decision("stock", reason): 2}
    # What cannot be counted is served all the same, and said once.
    schedule.reqs, caplog.records[:] = None, []
    for grown in (3, 4):
        batch_requests.hook(world.batch(grown), None, schedule, runner)
    assert sum("no longer counted (internal_error)" in line for line in caplog.messages) == 1
    assert steps.counters.steps == {Decision("stock", reason): 2}


@pytest.mark.parametrize(
    ("served_alone", "prefill", "expected"),
    [(True, "chosen", True), (True, "other", False), (False, "chosen", False)],
)
def test_a_pair_of_sglangs_own_is_taken_apart(world, served_alone, prefill, expected):
    runner = world.runner
    parts = {"prefill_backend": Stock([]), "decode_backend": Stock([])}
    pair = type("HybridAttnBackend", (SimpleNamespace,), {})(**parts)
    pair.prefill_attention_backend_str, pair.decode_attention_backend_str = prefill, "prefix"
    runner.prefix_attn_steps = object() if served_alone else None
    made = AttentionBackends(
        attn_backend=pair, decode_attn_backend=None, decode_attn_backend_group=[],
        prefill_attention_backend_str=prefill, decode_attention_backend_str="prefix",
    )  # fmt: skip
    built = built_backends.hook(made, model_runner=runner).attn_backend
    assert (built is pair.decode_backend) == expected and (built is pair) != expected
    if expected:
        assert built.prefill_attention_backend_str == "chosen"
        assert built.decode_attention_backend_str == "chosen"


@pytest.mark.parametrize(
    ("mode", "topk", "plans"), [("decode", 1, True), ("decode", 4, False), ("prefill", 1, False)]
)
def test_a_target_model_is_where_it_does_not_verify_over_plans(world, mode, topk, plans):
    args = world.runner.server_args
    args.speculative_algorithm, args.speculative_attention_mode = "STANDALONE", mode
    args.speculative_eagle_topk = topk
    reason = None if plans else "speculative:STANDALONE"
    assert stock_alone.why_stock_alone(world.runner, Settings()) == reason


# --- an engine -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def window_engines(tmp_path_factory):
    """Engines of a small Olmo 3, all of whose layers see a window of 32 tokens."""
    model = write_tiny_olmo3(
        tmp_path_factory.mktemp("window_model"), layer_types=2 * ["sliding_attention"]
    )
    return Engines(model, tmp_path_factory.mktemp("window_engines"))


@pytest.mark.engine
@pytest.mark.long
def test_a_window_model_answers_as_from_the_default_server(window_engines):
    scenarios = plain("staggered", "siblings")
    tested = window_engines.run(Config("window", scenarios))
    default = window_engines.run(Config("default", scenarios, {"attention_backend": None}))
    assert tested.outputs == default.outputs
    assert "every step runs SGLang's own torch_native (layers:sliding_window)" in tested.log
    steps = [step for steps in tested.steps.values() for step in steps]
    assert steps and not [step for steps in default.steps.values() for step in steps]
    assert {(s["variant"], s["reason"]) for s in steps} == {("stock", "layers:sliding_window")}
