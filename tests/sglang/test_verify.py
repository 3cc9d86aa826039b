"""Verification of draft chains over plans: eager, and in SGLang's decode graphs of two variants.

SGLang's speculative workers do not start without a GPU: batches are as its EAGLE worker makes them.
"""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention import hybrid_attn_backend
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.speculative.eagle_info import EagleVerifyInput

from sgl_prefix_attn.engine import model_facts
from sgl_prefix_attn.engine.backend import PrefixAttnBackend
from sgl_prefix_attn.engine.extends import PlannedKinds
from sgl_prefix_attn.execute.full_attention import full_attention
from sgl_prefix_attn.records import Decision
from sgl_prefix_attn.settings import Settings
from tests.sglang.fake_graph_runner import GraphRunner, labels
from tests.sglang.fake_server import HQ, PLAIN_SERVER, D, Server, Stock, speculate
from tests.support.fake_sglang import LMCRadixCache
from tests.support.multi_token import CHAIN_FAULTS

TOKENS = 4  # of a draft
PREFIX, TREE = Decision("prefix", "default"), Decision("stock", "verify_tree")
VERIFY = ForwardMode.TARGET_VERIFY


def draft(lens: torch.Tensor, topk=1) -> EagleVerifyInput:
    """A chain behind each request's lens [B] tokens, with the mask that SGLang gives stock."""
    batch = len(lens)
    chain = torch.tril(torch.ones(TOKENS, TOKENS, dtype=torch.bool))
    masks = [torch.cat([chain.new_ones(TOKENS, n), chain], 1).flatten() for n in lens.tolist()]
    each = torch.arange(batch * TOKENS).view(batch, TOKENS)
    return EagleVerifyInput(
        draft_token=each.flatten(),
        custom_mask=torch.cat(masks),
        positions=(lens[:, None] + torch.arange(TOKENS)).flatten(),
        retrieve_index=each,
        retrieve_next_token=each,
        retrieve_next_sibling=torch.full_like(each, -1),
        retrieve_cum_len=None,
        spec_steps=TOKENS - 1,
        topk=topk,
        draft_token_num=TOKENS,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        seq_lens_sum=int(lens.sum()),
        seq_lens_cpu=lens,
    )


@pytest.fixture
def server(monkeypatch):
    speculate(monkeypatch)
    return Server(monkeypatch, prefill="prefix")


def verify_batch(server, grown, topk=1):
    """seq_lens are those before the draft, whose slots follow them on the rows; grown [] or [B]:
    tokens beyond the cached ones."""
    batch = server.batch(0, VERIFY)
    batch.seq_lens = batch.seq_lens_cpu = batch.seq_lens + torch.as_tensor(grown)
    rows = batch.req_pool_indices = torch.tensor([r.req_pool_idx for r in server.world.reqs])
    ahead = batch.seq_lens[:, None] + torch.arange(TOKENS)
    batch.out_cache_loc = server.world.req_to_token[rows[:, None], ahead].long().flatten()
    batch.spec_info = draft(batch.seq_lens, topk)
    return batch


def expected(server, q, batch):
    rows = batch.req_pool_indices.repeat_interleave(TOKENS)
    ends = (batch.seq_lens[:, None] + torch.arange(TOKENS) + 1).flatten()
    pool = server.runner.token_to_kv_pool
    out, _ = full_attention(
        q.view(-1, HQ, D), pool.k, pool.v, server.world.req_to_token, rows, ends, sm_scale=D**-0.5
    )
    return out.reshape(len(q), -1).float()


def eager(server, batch):
    server.observe(batch)
    server.backend.init_forward_metadata(batch)
    return attend(server, batch)


def attend(server, batch):
    generator = torch.Generator().manual_seed(1)
    rows = len(batch.out_cache_loc)
    q, k, v = (torch.randn(rows, heads, D, generator=generator) for heads in (HQ, 2, 2))
    return q, server.backend.forward_extend(q.flatten(1), k, v, server.layer, batch)


def test_lengths_that_move_by_what_was_accepted(server):
    for grown in (1, 5, 6, 9):
        batch = verify_batch(server, grown)
        q, out = eager(server, batch)
        torch.testing.assert_close(out, expected(server, q, batch), rtol=1e-5, atol=1e-5)
    assert not server.stock.calls
    assert server.backend.counters.extends == {PREFIX: 4}
    assert not server.backend.can_run_prefix, "a target model never decodes"


@pytest.mark.parametrize("fault", CHAIN_FAULTS.values())
def test_planted_faults_are_found(server, fault):
    batch = verify_batch(server, 2)
    server.observe(batch)
    server.backend.init_forward_metadata(batch)
    workspace = server.backend.extends.lane.executor.workspace
    fault(workspace.words)
    executor = server.backend.extends.lane.executor
    executor.backend.fill(
        workspace, executor.plan, server.world.req_to_token, batch.req_pool_indices
    )
    q, out = attend(server, batch)
    assert (out - expected(server, q, batch)).abs().max() > 1e-3


@pytest.mark.parametrize("change", ["tree", "ragged", "other"])
def test_drafts_that_are_no_chains_are_stock(server, change):
    batch = verify_batch(server, 1, topk=2 if change == "tree" else 1)
    if change == "ragged":
        batch.out_cache_loc = batch.out_cache_loc[:-1]
    if change == "other":
        batch.spec_info = type("OtherInput", (), {"draft_token_num": TOKENS})()
    eager(server, batch)
    assert server.stock.calls == ["metadata", "extend"]
    assert server.backend.counters.extends == {TREE: 1}


def test_where_prefill_verifies_and_is_another_nothing_is_built(monkeypatch):
    speculate(monkeypatch)
    server = Server(monkeypatch)
    assert not server.backend.extends.kinds.any and not server.backend.can_capture(VERIFY)


def test_where_no_batch_can_be_verified_over_a_plan_graphs_are_sglangs(monkeypatch):
    speculate(monkeypatch)
    assert Server(monkeypatch, prefill="prefix").backend.can_capture(VERIFY)
    monkeypatch.setattr(model_facts, "unsupported_extend", lambda runner: "layers:bidirectional")
    assert not Server(monkeypatch, prefill="prefix").backend.can_capture(VERIFY)


@pytest.mark.parametrize(
    ("algorithm", "topk"), [("EAGLE", 4), ("DFLASH", None), ("FROZEN_KV_MTP", 1)]
)
def test_where_no_draft_is_a_chain_graphs_are_sglangs(monkeypatch, algorithm, topk):
    speculate(monkeypatch, algorithm, topk)
    backend = Server(monkeypatch, prefill="prefix").backend
    assert backend.extends.kinds == PlannedKinds(prefill=True, verify=False)
    assert not backend.can_capture(VERIFY)


@pytest.fixture
def decode_verifies(monkeypatch, caplog):
    """--speculative-attention-mode decode with a prefill backend of SGLang's."""
    caplog.set_level("INFO")
    speculate(monkeypatch)
    monkeypatch.setitem(PLAIN_SERVER, "speculative_attention_mode", "decode")
    server = Server(monkeypatch, Settings(headroom=8))
    server.publish_config()
    server.runner.model_config = SimpleNamespace(context_len=512)
    # newer releases ask the context, older ones the arguments of the runner
    spec = SimpleNamespace(speculative_attention_mode="decode", speculative_algorithm="EAGLE")
    monkeypatch.setattr(hybrid_attn_backend, "get_spec", lambda: spec, raising=False)
    server.prefill = Stock([])
    server.runner.attn_backend = HybridAttnBackend(server.runner, server.prefill, server.backend)
    assert "decode steps run stock attention (speculative:EAGLE)" in caplog.text
    assert "every step" not in caplog.text, "verification does not"
    return server


def test_the_decode_backend_verifies_over_plans_where_it_is_asked_to(decode_verifies):
    server = decode_verifies
    runner = VerifyRunner(server)
    runner.capture()
    assert labels(runner) == [(n, label) for n in (4, 2, 1) for label in (None, "prefix")]
    captured = len(server.stock.calls)
    for grown in (1, 4):
        batch, q, out, replayed = runner.verify(grown)
        torch.testing.assert_close(out, expected(server, q, batch), rtol=1e-5, atol=1e-5)
        assert replayed and runner._replay_graph_key.variant_label == "prefix"
    assert len(server.stock.calls) == captured and "extend" not in server.prefill.calls
    assert server.backend.counters.extends == {PREFIX: 2}


def test_prompts_are_not_planned_where_only_verification_is(decode_verifies):
    server = decode_verifies
    batch = server.batch(0, ForwardMode.EXTEND)
    batch.extend_seq_lens_cpu = [4] * len(batch.seq_lens)
    server.observe(batch)
    assert server.backend.extends.lane.observed is None and not server.backend.counters.extends


# --- in graphs ------------------------------------------------------------------------------------


class VerifyRunner(GraphRunner):
    """SGLang's runner as a target model with speculative decoding has it."""

    def __init__(self, server, **options):
        super().__init__(server, mode=VERIFY, **options)
        self.captured_req_width = TOKENS
        generator = torch.Generator().manual_seed(2)
        self.qkv = [
            torch.randn(self.max_bs * TOKENS, heads, D, generator=generator) for heads in (HQ, 2, 2)
        ]
        for name in ("input_ids", "positions", "out_cache_loc"):
            setattr(self.buffers, name, torch.zeros(self.max_bs * TOKENS, dtype=torch.int64))

    def live(self, grown, topk=1):
        batch = verify_batch(self.server, grown, topk)
        for name, value in vars(super().live(grown, VERIFY)).items():
            vars(batch).setdefault(name, value)
        batch.input_ids = batch.positions = torch.zeros(len(batch.out_cache_loc), dtype=torch.int64)
        return batch

    def verify(self, grown, **options):
        """q and output of the batch's own rows, and whether a graph replayed."""
        batch = self.live(grown, **options)
        self.server.observe(batch)
        _, out, replayed = self.step(batch)
        rows = len(batch.out_cache_loc)
        return batch, self.qkv[0][:rows], out[:rows], replayed

    def _batch(self, size, mode):
        batch = super()._batch(size, mode)
        for name in ("input_ids", "positions", "out_cache_loc"):
            setattr(batch, name, getattr(self.buffers, name)[: size * TOKENS])
        return batch

    def _fill(self, batch, *, raw_bs, padded_bs, **options):
        for name, padding in (("seq_lens", 1), ("seq_lens_cpu", 1)):
            getattr(self.buffers, name)[:padded_bs] = padding
            getattr(self.buffers, name)[:raw_bs] = getattr(batch, name)
        self.buffers.out_cache_loc[: padded_bs * TOKENS] = 0
        self.buffers.out_cache_loc[: raw_bs * TOKENS] = batch.out_cache_loc
        self.buffers.req_pool_indices[:padded_bs] = 0
        self.buffers.req_pool_indices[:raw_bs] = batch.req_pool_indices

    def _forward(self, input_ids, positions, batch):
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput

        q, k, v = (x[: len(batch.seq_lens) * TOKENS] for x in self.qkv)
        out = self.attn_backend.forward_extend(
            q.flatten(1), k, v, self.server.layer, batch, **self.options
        )
        return LogitsProcessorOutput(next_token_logits=out.clone())


def test_each_size_has_a_graph_of_either_kind_and_batches_choose(server):
    runner = VerifyRunner(server)
    runner.capture()
    assert labels(runner) == [(n, label) for n in (4, 2, 1) for label in (None, "prefix")]
    for grown, cache in ((1, None), (4, None), (5, LMCRadixCache()), (8, None)):
        before = len(server.stock.calls)
        if cache is not None:
            batch = runner.live(grown)
            server.observe(batch, cache)
            _, _, replayed = runner.step(batch)
            assert replayed and server.stock.calls[before:] == ["out_graph", "in_graph", "extend"]
            continue
        batch, q, out, replayed = runner.verify(grown)
        torch.testing.assert_close(out, expected(server, q, batch), rtol=1e-5, atol=1e-5)
        assert replayed and len(server.stock.calls) == before
        assert runner._replay_graph_key.variant_label == "prefix"


def test_padding_rows_of_a_replay_are_zero(server, monkeypatch):
    runner = VerifyRunner(server)
    runner.capture()
    monkeypatch.setattr(torch, "empty_like", lambda q: torch.full_like(q, float("nan")))
    batch = runner.live(1)
    server.observe(batch)
    padded = runner._batch(4, VERIFY)
    assert runner.can_run_graph(batch)
    runner.load_batch(batch)
    out = runner._forward(None, None, padded).next_token_logits
    rows = len(batch.out_cache_loc)
    assert out[:rows].isfinite().all() and (out[rows:] == 0).all()


def test_graphs_captured_between_batches_clear_all_rows(server, monkeypatch):
    """What a capture does not clear of its output, no replay does."""
    first = VerifyRunner(server)
    first.capture()
    first.verify(1)
    monkeypatch.setattr(torch, "empty_like", lambda q: torch.full_like(q, float("nan")))
    runner = VerifyRunner(server)
    forward, outs = runner._forward, []

    def noting(*args):
        result = forward(*args)
        if server.backend.graph_is_prefix:
            outs.append(result.next_token_logits)
        return result

    monkeypatch.setattr(runner, "_forward", noting)
    runner.capture()
    assert outs and all((out == 0).all() for out in outs)


def test_graphs_are_captured_for_the_backend_that_will_replay_them(server):
    """Adaptive drafts: SGLang captures graphs for a second backend while the model still has the
    first, and changes to it later."""
    first = VerifyRunner(server)
    first.capture()
    model, before = server.runner, server.backend
    model.attn_backend = PrefixAttnBackend(model, Settings(headroom=8, prefill=True))
    second = VerifyRunner(server)
    server.backend, model.attn_backend = model.attn_backend, before
    server._trace_prefix_kernels(server.backend.extends.lane.executor)
    second.capture()
    assert labels(second) == labels(first)
    model.attn_backend = server.backend
    batch, q, out, replayed = second.verify(1)
    torch.testing.assert_close(out, expected(server, q, batch), rtol=1e-5, atol=1e-5)
    assert replayed and second._replay_graph_key.variant_label == "prefix"


def test_a_size_without_a_prefix_graph_is_stock(monkeypatch):
    speculate(monkeypatch)
    server = Server(monkeypatch, Settings(max_variant_bs=2, prefill=True), prefill="prefix")
    runner = VerifyRunner(server)
    runner.capture()
    assert labels(runner) == [(4, None), (2, None), (2, "prefix"), (1, None), (1, "prefix")]
    runner.verify(1)
    assert server.backend.counters.extends == {Decision("stock", "graph_batch_size"): 1}


def test_a_cross_checked_batch_runs_eagerly(monkeypatch):
    speculate(monkeypatch)
    server = Server(
        monkeypatch, Settings(check=True, check_every=2, prefill=True), prefill="prefix"
    )
    runner = VerifyRunner(server)
    runner.capture()
    assert [runner.verify(grown)[3] for grown in (1, 2, 3)] == [True, False, True]
    assert server.backend.counters.mismatches == 1, "the fake stock backend is wrong"
