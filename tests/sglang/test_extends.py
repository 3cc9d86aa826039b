"""Extend batches over plans: greedy outputs on real CPU engines, and the backend's state machine.

The policy and the preparation of a batch: tests/cpu/test_extend.py.
"""

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sgl_prefix_attn.engine import extends as extends_module
from sgl_prefix_attn.engine import model_facts
from sgl_prefix_attn.engine.model_facts import attention_layers
from sgl_prefix_attn.execute.full_attention import full_attention
from sgl_prefix_attn.records import Decision
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.step.policy import PLAN_US
from tests.sglang.engine import STOCK, Config
from tests.sglang.fake_server import HKV, HQ, D, Server, Stock
from tests.sglang.test_outputs import CHECKED, EVERYTHING, REFERENCE

FAULTS = ("swap_chains", "drop_a_token")
PLANNED = {**CHECKED, "PREFIX_ATTN_CHECK_EVERY": "1", "PREFIX_ATTN_PREFILL": "1"}
ENGINE = Config(
    "extends",
    EVERYTHING + tuple(("siblings", fault) for fault in (*FAULTS, "planner_error")),
    {"prefill_attention_backend": "prefix", "chunked_prefill_size": 64, "enable_mixed_chunk": True},
    {"PREFIX_ATTN_STRATEGY": "naive", **PLANNED},  # others read short nodes several times
)
HOPPER = Config(
    "extends_on_hopper",
    (("siblings", ""), ("two_turns", "")),
    {"prefill_attention_backend": "prefix", "page_size": 16},
    {"PROBE_HOPPER": "1", **PLANNED},
)


def extends_of(run, key) -> list[dict]:
    return [step for step in run.steps[key] if "extend" in step]


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.parametrize("config", [ENGINE, HOPPER], ids=lambda config: config.name)
def test_outputs_equal_stock_and_passed_the_checks(engines, config):
    stock, prefix = engines.run(REFERENCE, STOCK), engines.run(config)
    sound = [key for key in config.scenarios if not key[1]]
    for key in sound:
        assert prefix.outputs[key] == stock.outputs[key], f"{key} differs"
    found = [step for key in sound for step in extends_of(prefix, key)]
    assert {(step["variant"], step["reason"]) for step in found} == {
        ("prefix", "default"), ("stock", "unshared"),
    }  # fmt: skip
    assert found[-1]["mismatches"] == 0
    assert any(step["cross_check"] for step in found)
    planned = [step for step in extends_of(prefix, ("siblings", "")) if step["read"]]
    assert any(step["read"] < step["query_centric"] for step in planned)
    # how many of the four arrive together is the machine's affair
    assert any(len(step["extend"]) >= 2 and max(step["extend"]) >= 6 for step in planned)


@pytest.mark.engine
@pytest.mark.long
def test_mixed_chunks_run_plans(engines):
    """A batch of requests that decode, one token each, and of a long prompt's chunk."""
    found = extends_of(engines.run(ENGINE), ("late_prompt", ""))
    assert any(
        step["variant"] == "prefix" and step["extend"].count(1) >= 2 and max(step["extend"]) > 30
        for step in found
    )


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_plans_are_found(engines, fault):
    """By the outputs, and by the check of layers against stock attention."""
    run = engines.run(ENGINE)
    assert run.outputs["siblings", fault] != engines.run(REFERENCE, STOCK).outputs["siblings", ""]
    steps = run.steps["siblings", fault]
    assert steps[0]["mismatches"] < steps[-1]["mismatches"]


@pytest.mark.engine
@pytest.mark.long
def test_a_planner_error_costs_the_gain_and_not_the_output(engines):
    run = engines.run(ENGINE)
    reasons = {(s["variant"], s["reason"]) for s in extends_of(run, ("siblings", "planner_error"))}
    assert ("stock", "planner_error") in reasons and not any(v == "prefix" for v, _ in reasons)
    right = engines.run(REFERENCE, STOCK).outputs["siblings", ""]
    assert run.outputs["siblings", "planner_error"] == right


# --- the backend over a fake runner ---------------------------------------------------------------

PREFIX_BATCH = Decision("prefix", "default")


class PrefillServer(Server):
    """Serves prefill, too; three requests below one node, each with `lens` new tokens."""

    def __init__(self, monkeypatch, *args, prefill="prefix", **options):
        super().__init__(monkeypatch, *args, prefill=prefill, **options)

    def extend_batch(self, lens=(3, 1, 7), mode=ForwardMode.EXTEND):
        batch = self.batch(1, mode)
        batch.extend_seq_lens_cpu = list(lens)
        batch.seq_lens = batch.seq_lens_cpu = batch.seq_lens - 1 + torch.tensor(lens)
        batch.out_cache_loc = torch.cat(
            [self.world.req_to_token[i, end - n : end] for i, n, end in
             zip(range(3), lens, batch.seq_lens.tolist(), strict=True)]
        ).long()  # fmt: skip
        return batch

    def extend(self, batch, padding=0, **options):
        """q and output of one layer of an observed batch."""
        self.observe(batch)
        self.backend.init_forward_metadata(batch)
        total = sum(batch.extend_seq_lens_cpu)
        generator = torch.Generator().manual_seed(0)
        q = torch.randn(total + padding, HQ * D, generator=generator)
        k, v = (torch.randn(total, HKV, D, generator=generator) for _ in range(2))
        return q, self.backend.forward_extend(q, k, v, self.layer, batch, **options)

    def expected_extend(self, q, batch):
        pool, lens = self.runner.token_to_kv_pool, batch.extend_seq_lens_cpu
        rows = torch.repeat_interleave(torch.arange(3), torch.tensor(lens))
        ends = torch.cat([torch.arange(n) - n + 1 for n in lens]) + batch.seq_lens[rows]
        out, _ = full_attention(
            q.view(-1, HQ, D), pool.k, pool.v, self.world.req_to_token, rows, ends,
            sm_scale=D**-0.5,
        )  # fmt: skip
        return out.reshape(len(q), -1).float()


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.MIXED])
def test_extend_batches_equal_full_attention_between_decode_steps(monkeypatch, mode):
    server = PrefillServer(monkeypatch)
    server.assert_attention(*server.eager_step(1))
    for lens in ((3, 1, 7), (30, 2, 1)):
        batch = server.extend_batch(lens, mode)
        q, out = server.extend(batch)
        torch.testing.assert_close(out, server.expected_extend(q, batch), rtol=1e-5, atol=1e-5)
    server.assert_attention(*server.eager_step(2))  # its plan is still there
    assert not server.stock.calls
    assert server.backend.counters.extends == {PREFIX_BATCH: 2}
    assert server.backend.counters.plans == {"first": 1}


def test_a_plan_must_save_in_all_layers_what_it_costs(monkeypatch):
    made = {}

    class Noted(extends_module.ExtendPreparer):
        def __init__(self, *args, **options):
            made.update(options)
            super().__init__(*args, **options)

    monkeypatch.setattr(extends_module, "ExtendPreparer", Noted)
    server = PrefillServer(monkeypatch)
    assert made["least_saving_us"] == PLAN_US / len(attention_layers(server.runner))


def test_padding_rows_are_zero(monkeypatch):
    server = PrefillServer(monkeypatch)
    batch = server.extend_batch()
    monkeypatch.setattr(torch, "empty_like", lambda q: torch.full_like(q, float("nan")))
    _, out = server.extend(batch, padding=2)
    assert out[:-2].isfinite().all() and (out[-2:] == 0).all()


@pytest.mark.parametrize(
    ("settings", "prefill"), [(Settings(), "prefix"), (Settings(prefill=True), "torch_native")]
)
def test_switched_off_or_with_another_backend_for_prefill_they_are_stock(
    monkeypatch, settings, prefill
):
    server = PrefillServer(monkeypatch, settings, prefill=prefill)
    q, out = server.extend(server.extend_batch())
    assert out is q and server.stock.calls == ["metadata", "extend"]
    assert not server.backend.counters.extends


def test_stock_extend_batches_may_have_a_backend_of_their_own(monkeypatch):
    """FlashAttention 3 on a Hopper GPU; decode and verification stay with the other."""
    server = PrefillServer(monkeypatch, Settings(policy="stock", prefill=True))
    server.backend._stock_extend = prefill = Stock([])
    server.extend(server.extend_batch())
    assert prefill.calls == ["metadata", "extend"] and not server.stock.calls
    server.backend.init_forward_metadata(server.batch(1, ForwardMode.TARGET_VERIFY))
    server.eager_step(1)
    assert server.stock.calls == ["metadata", "metadata", "decode"] and len(prefill.calls) == 2


def test_stock_verification_may_have_a_backend_of_its_own(monkeypatch):
    """FlashAttention 3 again, eagerly and in graphs; FlashInfer would take a mask along."""
    server = PrefillServer(monkeypatch, Settings(policy="stock", prefill=True))
    server.backend._stock_verify = verify = Stock([])
    server.backend.init_cuda_graph_state(4, 12)
    server.backend.on_after_cuda_graph_warmup()
    batch = server.batch(1, ForwardMode.TARGET_VERIFY)
    server.backend.init_forward_metadata(batch)
    server.backend.init_forward_metadata_out_graph(batch, in_capture=True)
    server.backend.init_forward_metadata_in_graph(batch)
    server.backend.forward_extend(torch.zeros(3, HQ * D), None, None, server.layer, batch)
    server.eager_step(1)
    assert verify.calls == ["graph_state", "metadata", "out_graph:capture", "in_graph", "extend"]
    assert server.stock.calls == ["graph_state", "metadata", "decode"]


def test_a_model_with_other_layers_plans_no_prompts_and_takes_no_memory_for_them(
    monkeypatch, caplog
):
    caplog.set_level("INFO")
    window = RadixAttention(HQ, D, 1.0, HKV, 1, sliding_window_size=16)
    server = PrefillServer(monkeypatch, others=[window])
    server.extend(server.extend_batch())
    assert server.backend.counters.extends == {Decision("stock", "layers:sliding_window"): 1}
    assert "prompts run stock attention (layers:sliding_window)" in caplog.text
    assert "of shared prefixes" not in caplog.text
    backend = server.backend
    assert backend.extends.lane.executor is backend.decode.executor, "a workspace of its own"
    server.assert_attention(*server.eager_step(1))


def test_a_batch_that_was_not_observed_is_stock(monkeypatch):
    server = PrefillServer(monkeypatch)
    batch = server.extend_batch()
    server.extend(batch)
    server.backend.init_forward_metadata(batch)
    server.backend.forward_extend(torch.zeros(11, HQ * D), None, None, server.layer, batch)
    assert server.stock.calls == ["metadata", "extend"]


def test_a_graph_that_holds_attention_is_stocks(monkeypatch):
    """SGLang's full prefill graphs: later batches say so."""
    server = PrefillServer(monkeypatch)
    batch = server.extend_batch()
    server.observe(batch)
    server.backend.init_forward_metadata_out_graph(batch)
    server.extend(batch)
    assert server.stock.calls == ["out_graph", "metadata", "extend"]
    assert server.backend.counters.extends[Decision("stock", "prefill_graph")] == 1


@pytest.mark.parametrize("kernel", ["load", "run"])
def test_kernels_that_fail_leave_a_server_with_stock_prefill(monkeypatch, caplog, kernel):
    # Of drafts, beside decode steps: what fails ends both.
    monkeypatch.setattr(model_facts, "verifies_chains", lambda server_args: True)
    server = PrefillServer(monkeypatch)
    batch = server.extend_batch()
    assert server.backend.extends.can_verify
    with monkeypatch.context() as patched:
        executor = server.backend.extends.lane.executor
        patched.setattr(executor, kernel, lambda *_, **__: 1 / 0)
        q, out = server.extend(batch)
    assert out is q and server.stock.calls == ["metadata", "extend"]
    assert server.stock.saved == [kernel == "load"], "KV is written once"
    assert not server.backend.extends.can_verify, "no graph of verification is captured any more"
    assert "prefix kernels failed in an extend or verify batch: division by zero" in caplog.text
    server.extend(batch)
    assert server.backend.counters.extends[Decision("stock", "kernel_error")] == 1
    server.assert_attention(*server.eager_step(1))


def test_an_error_while_a_batch_is_prepared_leaves_a_server_with_stock_prefill(monkeypatch, caplog):
    server = PrefillServer(monkeypatch)
    with monkeypatch.context() as patched:
        patched.setattr(server.backend.extends._preparer, "prepare", lambda *_: 1 / 0)
        q, out = server.extend(server.extend_batch())
    assert out is q and "an extend or verify batch could not be prepared" in caplog.text
    server.extend(server.extend_batch())
    assert server.backend.counters.extends[Decision("stock", "internal_error")] == 1
    server.assert_attention(*server.eager_step(1))


def test_with_tensor_parallelism_they_are_raised(monkeypatch):
    server = PrefillServer(monkeypatch, tp_size=2)
    monkeypatch.setattr(server.backend.extends.lane.executor, "run", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        server.extend(server.extend_batch())


def test_a_layer_option_turns_prefill_to_stock(monkeypatch):
    server = PrefillServer(monkeypatch)
    batch = server.extend_batch()
    q, out = server.extend(batch, sinks=torch.zeros(HQ))
    assert out is q and server.stock.saved == [True]
    server.extend(batch)
    assert server.backend.counters.extends[Decision("stock", "layer_option:sinks")] == 1


def test_cross_check_counts_a_layer_that_differs(monkeypatch):
    server = PrefillServer(monkeypatch, Settings(check=True, check_every=2, prefill=True))
    for _ in range(3):
        server.extend(server.extend_batch())
    assert server.stock.calls == ["metadata", "extend"], "every second batch"
    assert server.backend.counters.mismatches == 1, "the fake stock backend is wrong"
