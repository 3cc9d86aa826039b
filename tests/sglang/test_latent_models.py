"""Models with multi-head latent attention: absorbed, their decode steps run plans."""

from inspect import signature
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.speculative.draft_utils import DraftBackendFactory

from sgl_prefix_attn.engine import build, fallback, model_facts, sglang_config
from sgl_prefix_attn.engine.runner_backend import find_observer
from sgl_prefix_attn.execute.backends.portable_backend import PortableBackend
from sgl_prefix_attn.metrics.counters import KvSize
from sgl_prefix_attn.patches import batch_requests, built_backends, draft_names
from sgl_prefix_attn.plugin import entry_point, hooks
from sgl_prefix_attn.records import Decision
from sgl_prefix_attn.settings import Settings
from tests.sglang.conftest import Engines
from tests.sglang.engine import STOCK, Config, plain
from tests.sglang.fake_server import HQ, LATENT, D, Server, Stock, speculate
from tests.sglang.test_extends import PrefillServer
from tests.sglang.test_verify import expected, verify_batch
from tests.support.tiny_models import write_tiny
from tests.support.torch_hopper import as_on_hopper

SCENARIOS = plain("staggered", "late_prompt", "two_turns", "siblings", "long_siblings")
FAULTS = ("shared_node_dropped", "not_appended", "tails_swapped")
ENV = {"PREFIX_ATTN_CHECK": "1", "PREFIX_ATTN_CHECK_EVERY": "4"}
DECODE = Config("deepseek_v2", SCENARIOS + tuple(("long_siblings", x) for x in FAULTS), env=ENV)
PROMPTS = Config(
    "prompts",
    plain("late_prompt", "long_siblings"),
    {"prefill_attention_backend": "prefix", "chunked_prefill_size": 64},
    {"PREFIX_ATTN_PREFILL": "1", **ENV},
)


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    model = write_tiny(tmp_path_factory.mktemp("deepseek_v2"), "deepseek_v2")
    return Engines(model, tmp_path_factory.mktemp("engines"))


@pytest.mark.engine
@pytest.mark.long
def test_decode_steps_run_plans(engines):
    prefix, stock = (engines.run(DECODE, name) for name in ("prefix", STOCK))
    for key in SCENARIOS:
        assert prefix.outputs[key] == stock.outputs[key], f"{key} differs"
        assert all(prefix.outputs[key])
    steps = [step for key in SCENARIOS for step in prefix.steps[key]]
    assert {(step["variant"], step["reason"]) for step in steps} == {("prefix", "default")}
    assert any(step["cross_check"] for step in steps) and not steps[-1]["mismatches"]
    siblings = prefix.steps["long_siblings", ""]
    shared = [step for step in siblings if step["nodes"] and len(step["requests"]) == 4]
    assert any(step["read"] < 0.6 * step["query_centric"] for step in shared)


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_show(engines, fault):
    run = engines.run(DECODE)
    assert run.outputs["long_siblings", fault] != run.outputs["long_siblings", ""]
    mismatches = [step["mismatches"] for step in run.steps["long_siblings", fault]]
    assert mismatches[-1] > mismatches[0]


@pytest.mark.engine
@pytest.mark.long
def test_prompts_are_stock_where_they_were_asked_over_plans_too(engines):
    prefix, stock = engines.run(PROMPTS), engines.run(DECODE, STOCK)
    for key in PROMPTS.scenarios:
        assert prefix.outputs[key] == stock.outputs[key], f"{key} differs"
    steps = [step for key in PROMPTS.scenarios for step in prefix.steps[key]]
    assert {(step["variant"], step["reason"]) for step in steps if "extend" in step} == {
        ("stock", "layers:expanded_prompts")
    }
    assert any(step["variant"] == "prefix" for step in steps)
    assert "prompts run stock attention (layers:expanded_prompts)" in prefix.log


# --- a layer -------------------------------------------------------------------------------------


def attend(server, batch, *, apart, **options):
    """The queries and the output of a decode step whose q and k come in one piece, or apart."""
    rows = len(batch.seq_lens)
    generator = torch.Generator().manual_seed(int(batch.seq_lens[0]))
    # as SGLang hands them over: of a product by head
    q = torch.randn(HQ, rows, D, generator=generator).transpose(0, 1)
    k = torch.randn(rows, 1, D, generator=generator)
    given = q.reshape(rows, -1), k
    if apart:
        given = q[..., :LATENT], k[..., :LATENT]
        options |= {"q_rope": q[..., LATENT:], "k_rope": k[..., LATENT:]}
    out = server.backend.forward_decode(*given, k[..., :LATENT], server.layer, batch, **options)
    assert options.get("save_kv_cache") is False or torch.equal(
        server.runner.token_to_kv_pool.k[batch.out_cache_loc], k
    )
    return q.reshape(rows, -1), out


@pytest.mark.parametrize("apart", [False, True])
def test_queries_and_keys_in_one_piece_or_apart(monkeypatch, apart):
    server = Server(monkeypatch, latent=True)
    for grown in (1, 2, 3):
        batch = server.batch(grown)
        server.observe(batch)
        server.backend.init_forward_metadata(batch)
        server.assert_attention(batch, *attend(server, batch, apart=apart))
    assert server.trace == ["prefix"] * 3


def test_other_options_end_plans(monkeypatch):
    server = Server(monkeypatch, latent=True)
    batch = server.batch(1)
    server.observe(batch)
    server.backend.init_forward_metadata(batch)
    options = {"save_kv_cache": False, "cos_sin_cache": torch.ones(1)}
    attend(server, batch, apart=True, **options)
    assert server.trace == ["stock"]
    server.observe(server.batch(2))
    assert ("stock", "layer_option:cos_sin_cache") in {
        (x.variant, x.reason) for x in server.backend.counters.steps
    }


def test_queries_apart_are_unknown_to_other_models(monkeypatch):
    server = Server(monkeypatch)
    server.eager_step(0, q_rope=torch.ones(1))
    assert server.trace == ["stock"]


@pytest.mark.parametrize("policy", ["auto", "prefix"])
def test_prompts_are_stock(monkeypatch, policy):
    """Most are expanded, and that layer has the id of the one that decodes."""
    settings = Settings(headroom=8, prefill=True, policy=policy)
    server = PrefillServer(monkeypatch, settings, latent=True)
    batch = server.extend_batch()
    expanded = RadixAttention(HQ, D, 1.0, HQ, layer_id=0)
    server.runner.model.append(expanded)
    assert model_facts.planned_layers(server.runner) == [server.layer]
    server.observe(batch)
    server.backend.init_forward_metadata(batch)
    rows = len(batch.out_cache_loc)
    kv = torch.ones(rows, HQ, D)
    server.backend.forward_extend(torch.ones(rows, HQ * D), kv, kv, expanded, batch)
    assert server.stock.calls == ["metadata", "extend"]
    reason = "layers:expanded_prompts"
    assert server.backend.counters.extends == {Decision("stock", reason): 1}


def test_drafts_are_verified_over_plans(monkeypatch):
    speculate(monkeypatch)
    server = Server(monkeypatch, prefill="prefix", latent=True)
    for grown in (1, 5, 6):
        batch = verify_batch(server, grown)
        server.observe(batch)
        server.backend.init_forward_metadata(batch)
        rows = len(batch.out_cache_loc)
        generator = torch.Generator().manual_seed(grown)
        q, k = (torch.randn(rows, heads, D, generator=generator) for heads in (HQ, 1))
        out = server.backend.forward_extend(
            q[..., :LATENT], k[..., :LATENT], k[..., :LATENT], server.layer, batch,
            q_rope=q[..., LATENT:], k_rope=k[..., LATENT:],
        )  # fmt: skip
        torch.testing.assert_close(out, expected(server, q, batch), rtol=1e-5, atol=1e-5)
    assert not server.stock.calls
    assert server.backend.counters.extends == {Decision("prefix", "default"): 3}


def test_chunks_of_a_cached_prefix_are_the_stock_backends(monkeypatch):
    before = Server(monkeypatch, latent=True).backend
    assert not hasattr(before, "init_mha_chunk_metadata")
    assert not before.supports_full_cuda_graph_chunked_prefix
    methods = "init_mha_chunk_metadata", "prepare_full_cuda_graph_chunked_prefix"
    for name in methods:
        monkeypatch.setattr(Stock, name, lambda _, x, name=name: (name, x), False)
    monkeypatch.setattr(Stock, "supports_full_cuda_graph_chunked_prefix", True)
    backend = Server(monkeypatch, latent=True).backend
    assert [getattr(backend, name)("batch") for name in methods] == [(x, "batch") for x in methods]
    assert backend.supports_full_cuda_graph_chunked_prefix


# --- who serves it, and what the model is told ----------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"kv_cache_dtype": torch.float8_e4m3fn}, "kv_dtype:float8_e4m3fn"),
        ({"token_to_kv_pool": type("DSATokenToKVPool", (), {})()}, "kv_pool:DSATokenToKVPool"),
        ({"token_to_kv_pool": type("MHATokenToKVPool", (), {})()}, "kv_pool:MHATokenToKVPool"),
    ],
)
def test_what_no_plan_can_read(monkeypatch, changes, reason):
    runner = Server(monkeypatch, latent=True).runner
    vars(runner).update(changes)
    assert model_facts.unsupported_model(runner) == reason


def test_what_no_kernel_on_a_gpu_can_read(monkeypatch):
    runner = Server(monkeypatch, latent=True).runner
    assert model_facts.why_no_kernels(runner) is None
    runner.device = "cuda"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert model_facts.why_no_kernels(runner) == f"latent_dim:{LATENT}"
    runner.server_args.enable_deterministic_inference = True  # for which there are no kernels
    assert model_facts.why_no_kernels(runner) == "layers:latent"


def test_kernels_that_fail_at_start_leave_sglangs_own(monkeypatch, caplog):
    server = Server(monkeypatch, latent=True)
    runner = server.runner
    runner.server_args.attention_backend = "chosen"
    runner.attn_backend = None
    monkeypatch.setitem(fallback.ATTENTION_BACKENDS, "chosen", lambda runner: Stock([]))
    monkeypatch.setattr(hooks, "verify_applied", lambda sglang: None)
    as_on_hopper(monkeypatch.setattr)
    failed = SimpleNamespace(why_not="off")
    monkeypatch.setattr(build, "self_test_verdict", lambda *_, **__: failed)
    on_a_gpu = PortableBackend.capabilities
    monkeypatch.setattr(build, "capabilities_on", lambda device: on_a_gpu)
    runner.attn_backend = entry_point.create(runner)
    assert type(runner.attn_backend) is Stock
    assert caplog.messages == [
        "Hopper's kernels failed at start: off (sgl-prefix-attn doctor: how to try again)",
        "--attention-backend prefix: every step runs SGLang's own chosen (failed_at_start)",
    ]
    schedule = SimpleNamespace(reqs=server.world.reqs, tree_cache=server.world.cache)
    for grown in (1, 2):
        batch_requests.hook(server.batch(grown), None, schedule, runner)
    steps = find_observer(runner).counters.steps
    assert steps == {Decision("stock", "failed_at_start"): 2}


@pytest.mark.parametrize(
    ("rank", "names", "seen"),
    [
        (512, ("fa3", "prefix"), ("fa3", "flashmla")),
        (512, ("prefix", "prefix"), ("flashmla", "flashmla")),
        (512, ("fa3", "fa3"), ("fa3", "fa3")),
        (None, ("fa3", "prefix"), ("fa3", "prefix")),
    ],
)
def test_the_model_sees_the_name_of_what_sglang_chose(monkeypatch, rank, names, seen):
    monkeypatch.setattr(sglang_config, "default_backend", lambda server_args: "flashmla")
    runner = SimpleNamespace(model_config=SimpleNamespace(kv_lora_rank=rank), server_args=None)
    attributes = ("prefill_attention_backend_str", "decode_attention_backend_str")
    child = SimpleNamespace(**dict.fromkeys(attributes))  # of two overlapping batches
    backend = SimpleNamespace(**dict(zip(attributes, names, strict=True)), children=[child])
    made = SimpleNamespace(attn_backend=backend)
    assert built_backends.hook(made, model_runner=runner) is made
    assert tuple(getattr(backend, name) for name in attributes) == seen
    renamed = [name for name, was, now in zip(attributes, names, seen, strict=True) if was != now]
    assert vars(child) == dict.fromkeys(attributes) | dict.fromkeys(renamed, "flashmla")


def factory_of_sglang(asked):
    """Make what SGLang makes the backends of a draft model with, as this release does."""
    args = SimpleNamespace(speculative_draft_attention_backend=asked)
    known = {
        "server_args": args,
        "draft_model_runner": SimpleNamespace(server_args=args, draft_attention_backend=asked),
        "topk": 1,
        "speculative_num_steps": 2,
    }
    taken = signature(DraftBackendFactory).parameters
    return DraftBackendFactory(**{name: known[name] for name in known if name in taken})


@pytest.mark.parametrize(
    ("backends", "asked", "name"),
    [
        (("fa3", "prefix"), "fa3", "fa3"),
        (("fa3", "fa3"), "fa3", None),  # another server's: left as SGLang has it
        (("fa3", "fa3"), None, None),
    ],
)
def test_drafts_have_a_name_of_their_own(monkeypatch, backends, asked, name):
    """Without one, of a step or of the whole, a model takes them for the server's backend."""
    monkeypatch.setattr(sglang_config, "attention_backends", lambda server_args: backends)
    factory = factory_of_sglang(asked)
    attribute = "decode_attention_backend_str"
    steps = [Stock([]), Stock([])]
    setattr(steps[1], attribute, "triton")  # as SGLang has named it
    made = SimpleNamespace(attn_backends=steps)
    assert draft_names.hook(made, factory) is made and draft_names.hook(None, factory) is None
    found = [getattr(one, attribute, None) for one in (made, *steps)]
    assert found == [name, name, "triton"]


def test_a_token_of_latent_kv_is_counted_once(monkeypatch):
    layers = [Server(monkeypatch, latent=True).layer] * 3
    assert KvSize.of(layers, 2, latent=True).token_bytes == 3 * D * 2
    assert KvSize.of(layers, 2).token_bytes == 3 * (D + LATENT) * 2
