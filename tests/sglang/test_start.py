"""What must not start, with a message that says what is supported."""

import ast
import contextlib
import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sgl_prefix_attn.engine import determinism, sglang_config, start_checks
from sgl_prefix_attn.engine.backend import STOCK_FACTS, PrefixAttnBackend
from sgl_prefix_attn.patches import server_arguments
from sgl_prefix_attn.plugin import entry_point, hooks, versions
from tests.sglang.engine import Config, plain

SGLANG = versions.installed()


def runner(**model):
    config = {"is_encoder_decoder": False, **model}
    hf_config = SimpleNamespace(architectures=["SomeModel"])
    return SimpleNamespace(model_config=SimpleNamespace(hf_config=hf_config, **config))


@pytest.mark.engine
def test_a_bad_environment_value_stops_the_server(engines):
    env = {"PREFIX_ATTN_STRATEGY": "fastest"}
    log = engines.failing(Config("bad_strategy", plain("siblings"), env=env))
    assert "PREFIX_ATTN_STRATEGY='fastest': allowed is query | naive | compute | pat" in log
    assert "Load weight" not in log


def test_unsupported_models_are_refused_by_name():
    refused = "SomeModel is an encoder-decoder model; supported are decoder-only models"
    with pytest.raises(ValueError, match=refused):
        entry_point.create(runner(is_encoder_decoder=True))


def test_a_model_that_goes_by_backends_names_is_refused():
    sarvam = runner()
    sarvam.model_config.hf_config.architectures = ["SarvamMLAForCausalLM"]
    with pytest.raises(ValueError, match="SarvamMLAForCausalLM lays out queries and keys by"):
        entry_point.create(sarvam)


@pytest.mark.parametrize("backends", [("prefix", "prefix"), ("fa3", "prefix"), ("fa3", "fa3")])
def test_they_are_refused_with_the_arguments_when_the_backend_is_asked_for(backends, monkeypatch):
    model = runner(is_encoder_decoder=True).model_config
    monkeypatch.setattr(sglang_config, "attention_backends", lambda server_args: backends)
    monkeypatch.setattr(sglang_config, "model_config", lambda server_args: model)
    asked = "prefix" in backends
    with pytest.raises(ValueError, match="encoder") if asked else contextlib.nullcontext():
        server_arguments.hook(None, object())


@pytest.fixture
def served_model(monkeypatch):
    model = runner().model_config
    options = SimpleNamespace(
        enable_deterministic_inference=False,
        rl_on_policy_target=None,
        speculative_algorithm=None,
        speculative_attention_mode="prefill",
        speculative_adaptive=False,
        attention_backend="fa3",
        device="cuda",
        disable_radix_cache=False,
        kv_cache_dtype="auto",
    )
    monkeypatch.setattr(sglang_config, "options", lambda _: options)
    monkeypatch.setattr(sglang_config, "attention_backends", lambda _: ("fa3", "prefix"))
    monkeypatch.setattr(sglang_config, "model_config", lambda _: model)
    return options


@pytest.mark.parametrize("plans_prompts", ["0", "1"])
def test_prefill_beside_another_decode_backend_is_refused(served_model, monkeypatch, plans_prompts):
    """Whatever else is asked: SGLang's pair hides our backend from the hooks then."""
    monkeypatch.setenv("PREFIX_ATTN_PREFILL", plans_prompts)
    monkeypatch.setattr(sglang_config, "attention_backends", lambda _: ("prefix", "fa3"))
    with pytest.raises(ValueError, match="cannot prefill beside fa3, .* no other --decode-att"):
        start_checks.check(None)


@pytest.mark.parametrize("backends", [("fa3", "prefix"), ("prefix", "prefix"), ("fa3", "fa3")])
@pytest.mark.parametrize("asked", ["enable_deterministic_inference", "rl_on_policy_target"])
def test_planned_prompts_have_to_be_asked_for(served_model, monkeypatch, backends, asked):
    """SGLang turns the first on where the second is given."""
    monkeypatch.setattr(sglang_config, "attention_backends", lambda _: backends)
    start_checks.check(None)
    served_model.enable_deterministic_inference = True
    if asked == "rl_on_policy_target":
        served_model.rl_on_policy_target = "fsdp"
    refused = pytest.raises(ValueError, match=f"--{asked.replace('_', '-')}.*to run fa3")
    with refused if backends[0] == "prefix" else contextlib.nullcontext():
        start_checks.check(None)
    monkeypatch.setenv("PREFIX_ATTN_PREFILL", "1")
    start_checks.check(None)


@pytest.mark.parametrize(("kind", "refused"), [("full", True), ("breakable", False), (None, False)])
def test_no_graph_holds_attention_of_deterministic_prompts(
    served_model, monkeypatch, kind, refused
):
    monkeypatch.setattr(sglang_config, "attention_backends", lambda _: ("prefix", "prefix"))
    monkeypatch.setenv("PREFIX_ATTN_PREFILL", "1")
    served_model.enable_deterministic_inference = True
    prefill = SimpleNamespace(backend=kind or "disabled")
    served_model.cuda_graph_config = SimpleNamespace(prefill=prefill)
    with (
        pytest.raises(ValueError, match="a full prefill graph holds attention")
        if refused
        else contextlib.nullcontext()
    ):
        start_checks.check(None)


@pytest.mark.parametrize("on", [True, False])
def test_deterministic_prompts_that_no_plan_serves_are_refused(served_model, on):
    served_model.enable_deterministic_inference = on
    determinism.raise_if_prompts_are_stock(None, None)
    with (
        pytest.raises(ValueError, match=r"prompts \(layers:windows\).* for decode alone")
        if on
        else contextlib.nullcontext()
    ):
        determinism.raise_if_prompts_are_stock(None, "layers:windows")


@pytest.mark.parametrize(
    ("chunk", "mixed", "most"), [(8192, False, 8192), (512, True, 560), (-1, False, 65536)]
)
def test_the_largest_deterministic_prompt(served_model, chunk, mixed, most):
    served_model.chunked_prefill_size, served_model.enable_mixed_chunk = chunk, mixed
    served_model.max_prefill_tokens = 16384
    runner = SimpleNamespace(
        server_args=None, model_config=SimpleNamespace(context_len=65536),
        req_to_token_pool=SimpleNamespace(size=48),
    )  # fmt: skip
    assert determinism.most_prompt_tokens(runner) == most


def test_what_stands_against_deterministic_inference_is_named(served_model):
    served_model.enable_deterministic_inference = True
    start_checks.check(None)
    served_model.speculative_algorithm = "EAGLE"
    with pytest.raises(ValueError, match="drafts are verified by other kernels"):
        start_checks.check(None)
    served_model.speculative_algorithm, served_model.disable_radix_cache = None, True
    with pytest.raises(ValueError, match="the radix cache is off"):
        start_checks.check(None)


def test_no_batch_of_a_deterministic_server_is_too_large_for_plans(served_model, monkeypatch):
    """A limit is not passed over."""
    served_model.device, served_model.enable_deterministic_inference = "cpu", True
    start_checks.check(None)
    monkeypatch.setenv("PREFIX_ATTN_MAX_VARIANT_BS", "8")
    with pytest.raises(ValueError, match="PREFIX_ATTN_MAX_VARIANT_BS=8 leaves larger batches"):
        start_checks.check(None)
    served_model.enable_deterministic_inference = False
    start_checks.check(None)


@pytest.mark.parametrize("asked", [None, "torch_native", "triton"])
@pytest.mark.parametrize("on", [True, False])
def test_deterministic_inference_on_a_cpu_has_a_backend(on, asked, monkeypatch):
    """Whether it is named or not."""
    added = []
    for name in ("", "radix_supported_"):
        add = f"add_{name}deterministic_attention_backend_choices"
        monkeypatch.setattr(f"sglang.srt.server_args.{add}", added.extend)
    args = SimpleNamespace(
        enable_deterministic_inference=on, rl_on_policy_target=None, attention_backend=asked
    )
    determinism.choose_on_a_cpu(args)
    taken = on and asked != "triton"
    assert args.attention_backend == ("torch_native" if taken else asked)
    assert added == ["torch_native"] * 2 * taken


@pytest.mark.parametrize("on", [True, False])
def test_a_model_without_plans_is_not_served_as_deterministic(served_model, monkeypatch, on):
    served_model.enable_deterministic_inference = on
    monkeypatch.setattr(sglang_config, "default_backend", lambda _: "fa3")
    with (
        pytest.raises(ValueError, match=r"no plan .*\(layers:head_dim\).* to run fa3")
        if on
        else contextlib.nullcontext()
    ):
        determinism.raise_if_stock_alone(None, "layers:head_dim")


@pytest.mark.parametrize(("rank", "adaptive"), [(512, True), (512, False), (None, True)])
def test_adaptive_drafts_are_refused_beside_latent_attention(
    served_model, monkeypatch, rank, adaptive
):
    served_model.speculative_adaptive = adaptive
    sglang_config.model_config(None).kv_lora_rank = rank
    refused = pytest.raises(ValueError, match="--speculative-adaptive cannot serve")
    with refused if rank and adaptive else contextlib.nullcontext():
        start_checks.check(None)


def test_planning_inside_a_captured_graph_is_refused(served_model, monkeypatch):
    from sglang.srt.environ import envs

    if not hasattr(envs, start_checks.GLUE_GRAPH):
        pytest.skip("this SGLang does not know the variable")
    start_checks.check(None)
    monkeypatch.setenv(start_checks.GLUE_GRAPH, "1")
    with pytest.raises(ValueError, match=start_checks.GLUE_GRAPH):
        start_checks.check(None)


@pytest.mark.parametrize("dtype", ["nvfp4", "fp4_mx_block16", "fp4_e2m1", "fp8_e4m3", "auto"])
def test_fp4_kv_is_refused(served_model, dtype):
    served_model.kv_cache_dtype = dtype
    refused = pytest.raises(ValueError, match=f"cannot serve --kv-cache-dtype {dtype}")
    with refused if "fp4" in dtype else contextlib.nullcontext():
        start_checks.check(None)


@pytest.mark.parametrize(
    ("backends", "mode", "algorithm", "refused"),
    [
        (("prefix", "prefix"), "prefill", "EAGLE", True),
        (("fa3", "prefix"), "decode", "EAGLE", True),
        (("fa3", "prefix"), "prefill", "EAGLE", False),  # verified by FlashAttention 3
        (("prefix", "prefix"), "prefill", None, False),
    ],
)
def test_a_plan_stream_is_refused_where_drafts_are_verified_here(
    backends, mode, algorithm, refused, served_model, monkeypatch
):
    served_model.speculative_attention_mode = mode
    served_model.speculative_algorithm = algorithm
    monkeypatch.setattr(sglang_config, "attention_backends", lambda _: backends)
    start_checks.check(None)
    monkeypatch.setenv(start_checks.PLAN_STREAM, "1")
    message = pytest.raises(ValueError, match=start_checks.PLAN_STREAM)
    with message if refused else contextlib.nullcontext():
        start_checks.check(None)


OTHER_BACKENDS = """
import sys
from types import SimpleNamespace
from sgl_prefix_attn.plugin import entry_point
entry_point.register()
from sgl_prefix_attn.engine import sglang_config
from sgl_prefix_attn.patches import batch_requests, draft_backend, graph_capture
from sgl_prefix_attn.patches import graph_gate, graph_key
sglang_config.attention_backends = lambda server_args: ("fa3", "fa3")
backend = object()
for draft in (False, True):
    model = SimpleNamespace(is_draft_worker=draft, attn_backend=backend, server_args=None)
    runner = SimpleNamespace(
        model_runner=model, attn_backend=backend, enable_pdmux=False, capture_forward_mode=None
    )
    batch_requests.hook(None, None, None, model)
    assert graph_gate.hook(lambda runner, batch: "yes", runner, None) == "yes"
    assert graph_key.hook(lambda runner, size: size, runner, 3) == 3
    assert graph_capture.hook(lambda *args: "captured", runner, 3, None) == "captured"
    factory = SimpleNamespace(draft_model_runner=model, topk=1)
    assert draft_backend.hook(backend, factory) is backend
ours = {name for name in sys.modules if name.startswith("sgl_prefix_attn.")}
print(sorted(name for name in ours if ".plan" in name or ".execute" in name or ".engine.b" in name))
"""


@pytest.mark.long
def test_servers_of_other_backends_load_nothing_of_ours():
    """SGLang loads every installed plugin, and the hooks run in every server."""
    done = subprocess.run([sys.executable, "-c", OTHER_BACKENDS], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr[-2000:]


@pytest.mark.parametrize("name", SGLANG.release.hooks)
def test_hooks_take_what_a_newer_release_may_pass_besides(name):
    """versions.py lets a release run whose functions take more arguments than before."""
    parameters = inspect.signature(hooks.load(name).hook).parameters.values()
    assert inspect.Parameter.VAR_KEYWORD in {parameter.kind for parameter in parameters}


@pytest.mark.parametrize("chosen", [None, "rust"])
def test_a_readable_tree_is_asked_for_unless_another_was_chosen(served_model, monkeypatch, chosen):
    from sglang.srt.environ import envs

    variable = getattr(envs, start_checks.TREE_CORE, None)
    if variable is None or variable.default != "rust":
        pytest.skip("this SGLang's tree is in Python")
    from sglang.srt.mem_cache.unified_cache import unified_tree_core_interface as interface

    shows_paths = hasattr(interface.UnifiedTreeCoreInterface, "collect_path_info")
    # Set first, so that what the check sets is undone as well.
    monkeypatch.setenv(start_checks.TREE_CORE, chosen or "")
    if chosen is None:
        monkeypatch.delenv(start_checks.TREE_CORE)
    start_checks.check(None)
    assert variable.get() == ("rust" if chosen or shows_paths else "python")


NAMES = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
# What was asked for, what SGLang then resolves, and which backends run in the end.
ASKED = {
    ("prefix", None, None): ((None, None, "prefix"), (None, "prefix")),
    ("prefix", None, "prefix"): ((None, None, "prefix"), (None, "prefix")),
    (None, None, "prefix"): ((None, None, "prefix"), (None, "prefix")),
    ("fa3", None, None): (("fa3", None, None), ("fa3", "fa3")),
    # Asked for: it stays.
    ("prefix", "triton", None): ((None, "triton", "prefix"), ("triton", "prefix")),
    ("prefix", None, "fa3"): ((None, None, "fa3"), ("prefix", "fa3")),
    ("prefix", "prefix", None): ((None, None, "prefix"), ("prefix", "prefix")),
    (None, "prefix", "prefix"): ((None, None, "prefix"), ("prefix", "prefix")),
    ("triton", "prefix", None): (("triton", None, None), ("prefix", "triton")),
}


@pytest.mark.parametrize("given", ASKED)
def test_prefix_alone_speaks_of_decode(given, monkeypatch):
    monkeypatch.setattr(sglang_config, "settle", lambda args, **values: vars(args).update(values))
    args = SimpleNamespace(**dict(zip(NAMES, given, strict=True)), speculative_algorithm=None)
    resolved = []
    for _ in range(2):  # SGLang may resolve a record that is resolved
        hooks.load("keep_prefill").hook(
            lambda args: resolved.append(tuple(getattr(args, name) for name in NAMES)), args
        )
    every, prefill, decode = (getattr(args, name) for name in NAMES)
    assert (resolved, (prefill or every, decode or every)) == (
        [ASKED[given][0]] * 2,
        ASKED[given][1],
    )


@pytest.mark.parametrize(
    ("backends", "algorithm", "drafts", "drafts_then"),
    [
        (("prefix", None, None), "EAGLE", None, "flashinfer"),
        ((None, "prefix", "prefix"), "STANDALONE", "prefix", "flashinfer"),
        (("fa3", None, "prefix"), "EAGLE3", "fa3", "fa3"),
        (("fa3", None, None), "EAGLE", None, None),
        (("prefix", None, None), None, None, None),
    ],
)
def test_drafts_keep_a_backend_that_sglang_drafts_with(
    backends, algorithm, drafts, drafts_then, monkeypatch
):
    args = SimpleNamespace(
        **dict(zip(NAMES, backends, strict=True)),
        speculative_algorithm=algorithm,
        speculative_draft_attention_backend=drafts,
        speculative_attention_mode="prefill",
        kv_cache_dtype="auto",
    )
    monkeypatch.setattr(sglang_config, "settle", lambda args, **values: None)
    hooks.load("keep_prefill").hook(lambda args: None, args)
    assert args.speculative_draft_attention_backend == drafts_then


BEHIND_FLASHINFER = {"prefill_attention_backend": "flashinfer"}


@pytest.mark.parametrize(
    ("options", "drafts"),
    [
        ({}, "fa3"),
        ({"prefill_attention_backend": "fa3"}, "fa3"),
        ({"speculative_eagle_topk": 1, "page_size": 1}, "fa3"),
        ({"speculative_eagle_topk": 1, "page_size": 16}, "flashinfer"),
        ({"speculative_eagle_topk": 4}, "flashinfer"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "flashinfer"),
        (BEHIND_FLASHINFER, "flashinfer"),
        (BEHIND_FLASHINFER | {"speculative_attention_mode": "decode"}, "fa3"),
        ({"prefill_attention_backend": "prefix"}, "fa3"),
        ({"speculative_attention_mode": "decode"}, "fa3"),
    ],
)
def test_on_hopper_chains_are_drafted_by_what_sglang_chooses_there(options, drafts, monkeypatch):
    monkeypatch.setattr("sglang.srt.utils.common.is_hopper_with_cuda_12_3", lambda: True)
    given = {
        "attention_backend": "prefix", "prefill_attention_backend": None,
        "decode_attention_backend": None, "speculative_algorithm": "EAGLE",
        "speculative_draft_attention_backend": None, "speculative_attention_mode": "prefill",
        "speculative_eagle_topk": None, "page_size": None, "kv_cache_dtype": "auto",
    }  # fmt: skip
    args = SimpleNamespace(**given | options)
    monkeypatch.setattr(sglang_config, "settle", lambda args, **values: None)
    hooks.load("keep_prefill").hook(lambda args: None, args)
    assert args.speculative_draft_attention_backend == drafts


def test_an_sglang_that_is_too_old_is_refused_and_gets_no_hooks(monkeypatch):
    for version in ("0.5.16", "0.5.17rc1", "main"):
        monkeypatch.setattr(versions.metadata, "version", lambda name, version=version: version)
        with pytest.raises(
            RuntimeError, match=rf"{version} is installed, supported is 0\.5\.17 to"
        ):
            entry_point.create(runner())


@pytest.mark.parametrize(
    ("version", "row", "tried"),
    [
        ("0.5.17", "0.5.17", True),
        ("0.5.17+cu130", "0.5.17", True),
        ("0.5.19.post1", "0.5.19", False),
        ("0.5.99", versions.RELEASES[-1].version, False),
        ("0.6.0rc1", versions.RELEASES[-1].version, False),
    ],
)
def test_another_sglang_is_served_as_the_release_before_it(version, row, tried):
    found = versions.match(version)
    assert (found.version, found.release.version, found.tried) == (version, row, tried)


def test_what_a_hook_relies_on_is_compared_with_sglang(monkeypatch):
    assert [hooks.difference(name) for name in SGLANG.release.hooks] == [""] * len(
        SGLANG.release.hooks
    )
    gate = hooks.load("graph_gate")
    monkeypatch.setattr(gate, "PARAMETERS", ("self", "batch"))
    assert "can_run_graph(self, forward_batch" in hooks.difference("graph_gate")
    with pytest.raises(RuntimeError, match=r"can_run_graph\(self, .*begins otherwise than"):
        hooks.verify_applied(SGLANG)
    monkeypatch.setattr(gate, "TARGET", "sglang.srt.no_such_module.function")
    assert "no_such_module" in hooks.difference("graph_gate")


def test_a_hooked_module_that_lacks_a_package_names_the_package(tmp_path, monkeypatch):
    (tmp_path / "half_there.py").write_text("import a_package_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(hooks.load("graph_gate"), "TARGET", "half_there.Runner.can_run_graph")
    assert "a_package_that_is_missing" in hooks.difference("graph_gate")


def test_every_fact_that_flashinfer_states_of_itself_is_forwarded():
    """Read from the source: FlashInfer is not installed without a GPU."""
    base, stock = (
        _members(f"sglang.srt.layers.attention.{module}", name)
        for module, name in (
            ("base_attn_backend", "AttentionBackend"),
            ("flashinfer_backend", "FlashInferAttnBackend"),
        )
    )
    # forward_metadata is FlashInfer's own, and read by the graph that start_checks refuses.
    stated = {name for name in base & stock if name not in vars(PrefixAttnBackend)}
    assert stated - {"forward_metadata"} <= set(STOCK_FACTS)


def _members(module: str, name: str) -> set[str]:
    """Methods, class attributes and attributes of self of a class."""
    tree = ast.parse(Path(importlib.util.find_spec(module).origin).read_text())
    kind = next(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name)
    found = {n.name for n in kind.body if isinstance(n, ast.FunctionDef)} - {"__init__"}
    found |= {n.targets[0].id for n in kind.body if isinstance(n, ast.Assign)}
    found |= {n.target.id for n in kind.body if isinstance(n, ast.AnnAssign)}
    attributes = (n for n in ast.walk(kind) if isinstance(n, ast.Attribute))
    return found | {n.attr for n in attributes if isinstance(n.ctx, ast.Store)}


def test_a_hook_that_sglang_did_not_apply_is_named():
    from sglang.srt.plugins.hook_registry import HookRegistry

    needed = [hooks.load(name) for name in SGLANG.release.hooks]
    if not any(map(hooks._is_applied, needed)):  # no other test of this process has applied them
        with pytest.raises(RuntimeError) as error:
            hooks.verify_applied(SGLANG)
        assert all(patch.TARGET in str(error.value) for patch in needed)
        assert f"SGLang {versions.SUPPORTED}" in str(error.value) and "SGLANG_PLUGINS" in str(
            error.value
        )
    entry_point.register()
    entry_point.register()
    HookRegistry.apply_hooks()
    hooks.verify_applied(SGLANG)


def test_registration_offers_the_backend_once():
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES

    entry_point.register()
    entry_point.register()
    assert ATTENTION_BACKEND_CHOICES.count("prefix") == 1
    assert ATTENTION_BACKENDS["prefix"] is entry_point.create
