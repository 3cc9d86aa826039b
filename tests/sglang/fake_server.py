"""PrefixAttnBackend over a fake runner and a fake stock backend, driven as SGLang drives it."""

from types import SimpleNamespace

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sgl_prefix_attn.engine import backend as backend_module
from sgl_prefix_attn.engine import sglang_config
from sgl_prefix_attn.engine.backend import PrefixAttnBackend
from sgl_prefix_attn.settings import Settings
from tests.support.fake_sglang import World
from tests.support.parallel import ranks

HQ, HKV, D = 4, 2, 8
LATENT = 6  # elements of a latent row's value, of D
PLAIN_SERVER = {
    "enable_deterministic_inference": False,
    "enable_metrics": False,
    "enable_dp_attention": False,
    "enable_two_batch_overlap": False,
    "enable_pdmux": False,
    "speculative_algorithm": None,
    "speculative_attention_mode": "prefill",
    "speculative_eagle_topk": None,
    "speculative_num_steps": None,
    "speculative_draft_attention_backend": None,
    "enable_torch_compile": False,
    "enable_hierarchical_cache": False,
    "disable_radix_cache": False,
}


def speculate(monkeypatch, algorithm="EAGLE", topk=1):
    """Let the servers of a test verify drafts, chains where nothing else is asked for."""
    monkeypatch.setitem(PLAIN_SERVER, "speculative_algorithm", algorithm)
    monkeypatch.setitem(PLAIN_SERVER, "speculative_eagle_topk", topk)


class Stock(AttentionBackend):
    """Stock attention that answers 7; calls are the methods called, trace the kernels run, saved
    whether each decode was to write KV."""

    def __init__(self, trace):
        self.calls, self.trace, self.saved = [], trace, []

    def init_forward_metadata(self, forward_batch):
        self.calls.append("metadata")

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
        self.calls.append("out_graph:capture" if in_capture else "out_graph")

    def init_forward_metadata_in_graph(self, forward_batch):
        self.calls.append("in_graph")

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        self.calls.append("graph_state")

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        self.calls.append("decode")
        self.trace.append("stock")
        self.saved.append(save_kv_cache)
        return torch.full_like(q, 7.0)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        self.calls.append("extend")
        self.trace.append("stock")
        self.saved.append(save_kv_cache)
        return q


class Batch(SimpleNamespace):
    """A ForwardBatch: optional fields that a test does not set are None, as in SGLang's."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class Pool:
    kv_cache_layout = "nhd"

    def __init__(self, slots, dtype=torch.float32):
        generator = torch.Generator().manual_seed(0)
        self.k = torch.randn(slots, HKV, D, generator=generator).to(dtype)
        self.v = torch.randn(slots, HKV, D, generator=generator).to(dtype)

    def set_kv_buffer(self, layer, loc, k, v, k_scale=None, v_scale=None):
        """As SGLang's: in place."""
        if k.dtype != self.k.dtype and k_scale is not None:
            k.div_(k_scale)
            v.div_(v_scale)
        self.k[loc.loc], self.v[loc.loc] = k.to(self.k.dtype), v.to(self.v.dtype)

    def get_key_buffer(self, layer_id):
        return self.k

    def get_value_buffer(self, layer_id):
        return self.v


Pool.__name__ = "MHATokenToKVPool"


class LatentPool:
    """A row of D elements a token, whose first LATENT are its value."""

    def __init__(self, slots):
        self.k = torch.randn(slots, 1, D, generator=torch.Generator().manual_seed(0))
        self.v = self.k[..., :LATENT]

    def set_kv_buffer(self, layer, loc, k, v):
        self.k[loc.loc] = k

    def set_mla_kv_buffer(self, layer, loc, k, k_rope):
        """As SGLang 0.5.17's, of a bare loc."""
        self.k[loc] = torch.cat([k, k_rope], -1)

    def get_key_buffer(self, layer_id):
        return self.k

    def get_value_buffer(self, layer_id):
        return self.v


LatentPool.__name__ = "MLATokenToKVPool"


class Server:
    """A backend over a fake runner, and the steps that SGLang would drive it through.

    others  layers of the model beside the one that the steps run
    sinks   float32 [HQ] of that layer, which a model has as bfloat16; None: none
    latent  that layer's KV is LatentPool's
    """

    def __init__(
        self,
        monkeypatch,
        settings=Settings(headroom=8, prefill=True),  # noqa: B008
        tp_size=1,
        prefill="torch_native",
        others=(),
        sinks=None,
        latent=False,
    ):
        from sglang.srt.layers.radix_attention import RadixAttention

        self.world = World()
        for i in range(3):
            self.world.add([0] * 40 + [1 + i], tail=30)
        self.layer = RadixAttention(HQ, D, D**-0.5, HKV, layer_id=0)
        if latent:
            self.layer = RadixAttention(HQ, D, D**-0.5, 1, layer_id=0, v_head_dim=LATENT)
        self.options = {}  # of the layer, in each step
        if sinks is not None:
            self.layer.sinks = torch.nn.Parameter(sinks.bfloat16(), requires_grad=False)
            self.options["sinks"] = self.layer.sinks
        self.trace: list[str] = []  # kernels of each layer, as they run
        self.stock, self.beside = Stock(self.trace), Stock(self.trace)
        runner = SimpleNamespace(
            device="cpu",
            dtype=torch.float32,
            kv_cache_dtype=torch.float32,
            is_draft_worker=False,
            kv_index_translator=None,
            max_total_num_tokens=4096,
            page_size=1,
            model_config=SimpleNamespace(
                has_attention_sinks=sinks is not None,
                context_len=4096,
                is_encoder_decoder=False,
                hf_config=SimpleNamespace(architectures=["FakeForCausalLM"]),
                kv_lora_rank=LATENT if latent else None,
            ),
            model=torch.nn.Sequential(self.layer, *others),
            req_to_token_pool=SimpleNamespace(size=16, req_to_token=self.world.req_to_token),
            token_to_kv_pool=LatentPool(4096) if latent else Pool(4096),
            server_args=SimpleNamespace(
                **PLAIN_SERVER, attention_backend="torch_native", decode_log_interval=40
            ),
        )
        self.parallel = ranks(tp_size)
        # A second one serves the other layers of graphs with prefix kernels.
        stocks = iter([self.stock, self.beside] if others else [])
        monkeypatch.setattr(sglang_config, "parallel", lambda: self.parallel)
        monkeypatch.setattr(sglang_config, "options", lambda server_args: server_args)
        monkeypatch.setattr(sglang_config, "attention_backends", lambda args: (prefill, "prefix"))
        monkeypatch.setattr(backend_module, "create_stock", lambda *which: next(stocks, self.stock))
        self._monkeypatch = monkeypatch
        self.backend = PrefixAttnBackend(runner, settings)
        if self.backend.can_run_prefix:
            self._trace_prefix_kernels(self.backend.decode.executor)
        if self.backend.extends.kinds.any:
            self._trace_prefix_kernels(self.backend.extends.lane.executor)
        runner.attn_backend = self.backend
        self.runner = runner

    def _trace_prefix_kernels(self, executor):
        run = executor.run

        def traced(*args, **options):
            self.trace.append("prefix")
            run(*args, **options)

        executor.run = traced

    def publish_config(self):
        """Give SGLang's own runners options to read, until the test ends."""
        from sglang.srt.runtime_context import get_context

        context = get_context()
        for name in ("_server_args", "_config_bags", "_overrides_log", "_publish_role"):
            if hasattr(context, name):
                self._monkeypatch.setattr(context, name, getattr(context, name))
        self._monkeypatch.setattr(context.parallel, "_config", context.parallel._config)
        context.override_server_args().install()

    def batch(self, grown, mode=ForwardMode.DECODE):
        lens = torch.from_numpy(self.world.seq_lens(grown))
        rows = torch.arange(len(self.world.reqs))
        return Batch(
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

    def eager_step(self, grown, cache=None, **options):
        """The batch, q and output of an eager decode step of one layer."""
        batch = self.batch(grown)
        self.observe(batch, cache)
        self.backend.init_forward_metadata(batch)
        return (batch, *self.attend(batch, **options))

    def attend(self, batch, as_model=lambda q: q, **options):
        rows = len(batch.seq_lens)
        generator = torch.Generator().manual_seed(int(batch.seq_lens[0]))
        q = torch.randn(rows, HQ * D, generator=generator)
        k = torch.randn(rows, HKV, D, generator=generator)
        v = torch.randn(rows, HKV, D, generator=generator)
        passed = as_model(q)
        out = self.backend.forward_decode(passed, k, v, self.layer, batch, **self.options | options)
        return q, out

    def expected(self, q, batch):
        from sgl_prefix_attn.execute.full_attention import full_attention

        pool = self.runner.token_to_kv_pool
        out, _ = full_attention(
            q.view(-1, HQ, D), pool.k, pool.v, self.world.req_to_token,
            batch.req_pool_indices, batch.seq_lens, sm_scale=D**-0.5,
            logits_soft_cap=self.layer.logit_cap, **self.options,
        )  # fmt: skip
        return out.reshape(len(q), -1).float()

    def assert_attention(self, batch, q, out):
        torch.testing.assert_close(out, self.expected(q, batch), rtol=1e-5, atol=1e-5)
