"""The backend's own state machine with fake collaborators: graphs, dummy batches, options."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sgl_prefix_attn import backend as backend_module
from sgl_prefix_attn.backend import PrefixAttnBackend
from sgl_prefix_attn.envs import Settings
from tests.cpu.fake_sglang import HiRadixCache, World

HQ, HKV, D = 4, 2, 8


class Stock(AttentionBackend):
    def __init__(self):
        self.calls = []

    def init_forward_metadata(self, forward_batch):
        self.calls.append("metadata")

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
        self.calls.append("out_graph")

    def init_forward_metadata_in_graph(self, forward_batch):
        self.calls.append("in_graph")

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        self.calls.append("graph_state")

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        self.calls.append("decode")
        return torch.full_like(q, 7.0)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        self.calls.append("extend")
        return q


class Pool:
    kv_cache_layout = "nhd"

    def __init__(self, slots):
        generator = torch.Generator().manual_seed(0)
        self.k = torch.randn(slots, HKV, D, generator=generator)
        self.v = torch.randn(slots, HKV, D, generator=generator)

    def set_kv_buffer(self, layer, loc, k, v):
        self.k[loc.loc], self.v[loc.loc] = k, v

    def get_key_buffer(self, layer_id):
        return self.k

    def get_value_buffer(self, layer_id):
        return self.v


Pool.__name__ = "MHATokenToKVPool"


class Server:
    """A backend over a fake runner, and the steps that SGLang would drive it through."""

    def __init__(self, monkeypatch, settings=Settings(headroom=8)):  # noqa: B008
        from sglang.srt.layers.radix_attention import RadixAttention

        self.world = World()
        for i in range(3):
            self.world.add([0] * 40 + [1 + i], tail=30)
        self.layer = RadixAttention(HQ, D, D**-0.5, HKV, layer_id=0)
        self.stock = Stock()
        runner = SimpleNamespace(
            device="cpu",
            dtype=torch.float32,
            kv_cache_dtype=torch.float32,
            is_draft_worker=False,
            max_total_num_tokens=4096,
            model=torch.nn.Sequential(self.layer),
            req_to_token_pool=SimpleNamespace(size=16, req_to_token=self.world.req_to_token),
            token_to_kv_pool=Pool(4096),
            ps=SimpleNamespace(tp_rank=0, tp_size=1),
            server_args=SimpleNamespace(
                enable_metrics=False,
                dcp_size=1,
                enable_dp_attention=False,
                enable_two_batch_overlap=False,
                enable_pdmux=False,
            ),
        )
        monkeypatch.setattr(backend_module, "verify_applied", lambda: None)
        monkeypatch.setattr(backend_module, "create_stock", lambda runner: self.stock)
        self.backend = PrefixAttnBackend(runner, settings)
        runner.attn_backend = self.backend
        self.runner = runner

    def batch(self, grown, mode=ForwardMode.DECODE):
        lens = torch.from_numpy(self.world.seq_lens(grown))
        rows = torch.arange(len(self.world.reqs))
        return SimpleNamespace(
            forward_mode=mode,
            seq_lens=lens,
            seq_lens_cpu=lens,
            req_pool_indices=rows,
            out_cache_loc=self.world.req_to_token[rows, lens - 1].long(),
        )

    def observe(self, batch, cache=None):
        self.backend.observe(
            batch,
            SimpleNamespace(reqs=self.world.reqs, tree_cache=cache or self.world.cache),
        )

    def attend(self, batch, **options):
        rows = len(batch.seq_lens)
        generator = torch.Generator().manual_seed(int(batch.seq_lens[0]))
        q = torch.randn(rows, HQ * D, generator=generator)
        k = torch.randn(rows, HKV, D, generator=generator)
        v = torch.randn(rows, HKV, D, generator=generator)
        out = self.backend.forward_decode(q, k, v, self.layer, batch, **options)
        return q, out

    def expected(self, q, batch):
        from sgl_prefix_attn.reference import full_attention

        pool = self.runner.token_to_kv_pool
        out, _ = full_attention(
            q.view(-1, HQ, D), pool.k, pool.v, self.world.req_to_token,
            batch.req_pool_indices, batch.seq_lens, sm_scale=D**-0.5,
        )  # fmt: skip
        return out.reshape(len(q), -1).float()


@pytest.fixture
def server(monkeypatch):
    return Server(monkeypatch)


def eager_step(server, grown, cache=None, **options):
    batch = server.batch(grown)
    server.observe(batch, cache)
    server.backend.init_forward_metadata(batch)
    return (batch, *server.attend(batch, **options))


def test_eager_steps_equal_full_attention_planned_or_appended(server):
    for grown in range(1, 15):  # beyond the headroom of 8
        batch, q, out = eager_step(server, grown)
        torch.testing.assert_close(out, server.expected(q, batch), rtol=1e-5, atol=1e-5)
    assert server.backend.counters.plans == {"first": 1, "headroom": 1}
    assert not server.stock.calls


def test_replayed_steps_use_the_static_tensors_of_the_capture(server):
    backend = server.backend
    backend.init_cuda_graph_state(4, 4)
    static = server.batch(1)
    static.seq_lens, static.out_cache_loc = torch.ones(4).long(), torch.zeros(4).long()
    backend.init_forward_metadata_out_graph(static, in_capture=True)
    backend.init_forward_metadata_in_graph(static)
    for grown in (1, 2, 3):
        live = server.batch(grown)
        server.observe(live)
        assert not backend.needs_eager_step(live.forward_mode)
        static.seq_lens[:3], static.out_cache_loc[:3] = live.seq_lens, live.out_cache_loc
        view = SimpleNamespace(**{**vars(live), "out_cache_loc": None})
        backend.init_forward_metadata_out_graph(view)
        backend.init_forward_metadata_in_graph(static)  # what the graph recorded
        q, out = server.attend(live)
        torch.testing.assert_close(out, server.expected(q, live), rtol=1e-5, atol=1e-5)
    assert backend.counters.plans == {"first": 1}
    assert server.stock.calls == ["graph_state"]


def test_a_capture_between_steps_makes_the_next_one_plan(server):
    eager_step(server, 1)
    server.backend.init_forward_metadata_out_graph(server.batch(1), in_capture=True)
    batch, q, out = eager_step(server, 2)
    torch.testing.assert_close(out, server.expected(q, batch), rtol=1e-5, atol=1e-5)
    assert server.backend.counters.plans == {"first": 1, "capture": 1}


def test_stock_steps_run_eagerly_and_leave_no_plan_behind(server):
    eager_step(server, 1)
    other = HiRadixCache()
    batch = server.batch(2)
    server.observe(batch, other)
    assert server.backend.needs_eager_step(batch.forward_mode)
    _, _, out = eager_step(server, 2, other)
    assert (out == 7.0).all() and server.stock.calls == ["metadata", "decode"]
    batch, q, out = eager_step(server, 3)
    torch.testing.assert_close(out, server.expected(q, batch), rtol=1e-5, atol=1e-5)
    assert server.backend.counters.plans == {"first": 1, "lengths": 1}


def test_a_batch_that_was_not_observed_is_stock(server):
    batch = server.batch(1)  # SGLang's warm-up makes such batches
    server.backend.init_forward_metadata(batch)
    server.attend(batch)
    assert server.stock.calls == ["metadata", "decode"]
    assert server.backend.needs_eager_step(ForwardMode.DECODE)


def test_an_observed_step_is_used_once(server):
    eager_step(server, 1)
    batch = server.batch(1)
    server.backend.init_forward_metadata(batch)
    server.attend(batch)
    assert server.stock.calls == ["metadata", "decode"]


def test_prefill_and_verify_go_to_stock(server):
    for mode in (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.TARGET_VERIFY):
        batch = server.batch(1, mode)
        server.observe(batch)
        assert not server.backend.needs_eager_step(mode)
        server.backend.init_forward_metadata(batch)
    server.backend.init_forward_metadata_out_graph(server.batch(1, ForwardMode.TARGET_VERIFY))
    server.backend.init_forward_metadata_in_graph(server.batch(1, ForwardMode.TARGET_VERIFY))
    assert server.stock.calls == ["metadata"] * 3 + ["out_graph", "in_graph"]
    assert not server.backend.counters.steps


def test_a_layer_option_turns_all_later_steps_to_stock(server):
    _, _, out = eager_step(server, 1, sinks=torch.zeros(HQ))
    assert (out == 7.0).all() and server.stock.calls == ["metadata", "decode"]
    _, _, out = eager_step(server, 2)
    assert (out == 7.0).all()
    reasons = {decision.reason for decision in server.backend.counters.steps}
    assert reasons == {"default", "layer_option:sinks"}


def test_a_layer_option_in_a_capture_raises(server):
    batch = server.batch(1)
    server.backend.init_forward_metadata_out_graph(batch, in_capture=True)
    with pytest.raises(RuntimeError, match="pass `sinks`.*--disable-cuda-graph"):
        server.attend(batch, sinks=torch.zeros(HQ))


def test_behind_an_unknown_wrapper_graphs_are_stock(server):
    server.runner.attn_backend = SimpleNamespace(primary=server.backend)
    server.backend.init_cuda_graph_state(4, 4)
    server.backend.init_forward_metadata_out_graph(server.batch(1), in_capture=True)
    assert server.stock.calls == ["graph_state", "out_graph"]
    assert not server.backend.needs_eager_step(ForwardMode.DECODE)


def test_cross_check_counts_a_layer_that_differs(monkeypatch):
    server = Server(monkeypatch, Settings(check=True, check_every=2))
    for grown in (1, 2, 3):
        eager_step(server, grown)
    assert server.stock.calls == ["metadata", "decode"], "every second step"
    assert server.backend.counters.mismatches == 1, "the fake stock backend is wrong"
