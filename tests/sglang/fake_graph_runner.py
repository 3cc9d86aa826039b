"""SGLang's own DecodeCudaGraphRunner over fake buffers and fake graphs, without a GPU.

The methods that make keys, capture, admit and replay are SGLang's, with the plugin's hooks on them.
"""

from types import SimpleNamespace

import torch
from sglang.srt.layers.dp_attention import DpPaddingMode
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sgl_prefix_attn.plugin import entry_point
from tests.sglang.fake_server import HKV, HQ, Batch, D

MIB = 2**20
STOCK_STEP = ["out_graph", "in_graph", "decode"]  # what the stock backend sees of a replay
LIMIT = "PREFIX_ATTN_MAX_VARIANT_BS"


class Graphs:
    """Stands in for FullCudaGraphBackend: a graph is the forward function and what ran in it."""

    def __init__(self, trace: list[str]):
        self.trace = trace  # the kernels of the server, as they run
        self.graphs = {}  # ShapeKey -> (forward function, its trace), in the order of capture
        self.failing = {}  # ShapeKey -> error that its capture raises
        self.memory = 1000 * MIB
        self.cost = {}  # variant_label -> bytes of a graph, when not 1 MiB

    def capture_one(self, key, forward, capture_inputs=None, post_warmup_hook=None):
        for _ in range(2):
            forward()
            post_warmup_hook()
        if key in self.failing:
            raise self.failing[key]
        assert key not in self.graphs, "a graph would be lost"
        start = len(self.trace)
        forward()
        self.graphs[key] = forward, self.trace[start:]
        self.memory -= self.cost.get(key.variant_label, MIB)

    def can_run(self, forward_batch, key):
        return key in self.graphs

    def replay_session(self):
        return torch.no_grad()

    def replay(self, key, forward_batch):
        forward, recorded = self.graphs[key]
        start = len(self.trace)
        out = forward()
        assert self.trace[start:] == recorded, "a graph replays what was captured, nothing else"
        return out


class Device:
    """Stands in for torch.cuda."""

    def __init__(self, graphs):
        self.graphs = graphs
        self.broken = False

    def mem_get_info(self):
        return self.graphs.memory, 1 << 40

    def synchronize(self):
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    class Event:
        def record(self):
            pass

    def is_current_stream_capturing(self):
        return False


class GraphRunner(DecodeCudaGraphRunner):
    """Runner of a tests.sglang.fake_server.Server with graphs of the given batch sizes."""

    def __init__(self, server, sizes=(1, 2, 4), mode=ForwardMode.DECODE):
        entry_point.register()
        HookRegistry.apply_hooks()
        server.publish_config()
        self.server, self.keys = server, []  # keys: every one that was made
        self.options = {}  # what the model passes to attention
        model_runner = self.model_runner = server.runner
        model_runner.spec_algorithm = SpeculativeAlgorithm.NONE
        model_runner.capture_tail_hooks = []
        model_runner.canary_manager = model_runner.hisparse_coordinator = None
        model_runner.device_timer = None
        model_runner.server_args.debug_cuda_graph = False
        self.attn_backend = model_runner.attn_backend
        self.capture_forward_mode, self.capture_hidden_mode = mode, CaptureHiddenMode.NULL
        self.capture_bs, self.compile_bs, self.max_bs = sorted(sizes), [], max(sizes)
        self.captured_req_width = self.pp_size = self.seq_len_fill_value = 1
        self.ragged_verify_mode = self.disable_padding = self.enable_two_batch_overlap = False
        self.require_mlp_tp_gather = self.require_mlp_sync = self.is_encoder_decoder = False
        self.enable_pdmux = self.is_dllm = False
        self.tbo_plugin = SimpleNamespace(capture_one_batch_size=lambda *_, **__: None)
        self.deepep_adapter = SimpleNamespace(capture=lambda **_: None, replay=lambda: None)
        self.backend = Graphs(server.trace)
        self.device_module = Device(self.backend)
        generator = torch.Generator().manual_seed(1)
        self.qkv = [torch.randn(16, h, D, generator=generator) for h in (HQ, HKV, HKV)]
        zeros = ("input_ids", "positions", "req_pool_indices", "out_cache_loc")
        self.buffers = SimpleNamespace(
            **{name: torch.zeros(self.max_bs, dtype=torch.int64) for name in zeros},
            seq_lens=torch.ones(self.max_bs, dtype=torch.int64),
            seq_lens_cpu=torch.ones(self.max_bs, dtype=torch.int64),
            mamba_track_indices=None,
            num_token_non_padded=None,
        )
        self.buffer_registry = SimpleNamespace(fill_from=self._fill)
        self._set_what_later_releases_read()
        self.attn_backend.init_cuda_graph_state(self.max_bs, self.max_bs)

    def _set_what_later_releases_read(self):
        """Nothing of it is in use."""
        self.model_runner.capture_head_hooks = []
        self.model_runner.model.shared_experts_config = None
        self.model_runner.lora_manager = self.model_runner.kv_index_translator = None
        self.device = "cpu"
        self.attention_graph_variants = self.dllm_attention = self.dllm_input_preparation = None
        self.dllm_uses_input_embeds = self.use_ngram_embedding = False
        self._metadata_prep_fork_resolved, self._metadata_prep_fork = True, None
        self._metadata_glue = self._early_verify_metadata = None
        self._draft_metadata_glue = self._target_metadata_glue = False
        self._skips_prefilled_inputs = self._skip_glued_replay_view = False
        self.in_graph_metadata_prep_done = None
        self.require_attn_tp_gather = self.record_nolora_graph = False

    def capture(self):
        """As SGLang's _capture_one_stream: the largest size first, "lora" before "nolora"."""
        labels = ["lora", "nolora"] if getattr(self, "record_nolora_graph", False) else [None]
        for size in reversed(self.capture_bs):
            for label in labels:
                self.capture_one_shape(size, self._forward, None, label)

    def capture_prepare(self, size, stream_idx=None, num_tokens=None):
        batch = self._batch(size, self.capture_forward_mode)
        batch.dp_padding_mode = DpPaddingMode.SUM_LEN
        batch.global_dp_buffer_len = batch.global_num_tokens_cpu = None
        return batch, self.attn_backend, None

    def _make_graph_key(self, *args, **kwargs):
        self.keys.append(super()._make_graph_key(*args, **kwargs))
        return self.keys[-1]

    def live(self, grown, mode=ForwardMode.DECODE):
        """ForwardBatch of all of the server's requests, as ForwardBatch.init_new makes it."""
        batch = self.server.batch(grown, mode)
        size = batch.batch_size = len(batch.seq_lens)
        batch.input_ids = batch.positions = torch.zeros(size, dtype=torch.int64)
        batch.seq_lens_sum = int(batch.seq_lens.sum())
        batch.spec_info = batch.lora_ids = batch.replace_embeds = batch.encoder_lens = None
        batch.capture_hidden_mode = CaptureHiddenMode.NULL
        batch.needs_forward_metadata_init = lambda: True
        return batch

    def step(self, batch):
        """A step as ModelRunner runs it; q, output and whether a graph replayed."""
        if self.can_run_graph(batch):
            out = self.execute(batch).next_token_logits
            return self.qkv[0][: batch.batch_size].flatten(1), out, True
        self.attn_backend.init_forward_metadata(batch)
        out = self._forward(None, None, batch).next_token_logits
        return self.qkv[0][: batch.batch_size].flatten(1), out, False

    def _batch(self, size, mode):
        names = vars(self.buffers)
        fields = {k: names[k][:size] for k in names if names[k] is not None}
        return Batch(batch_size=size, forward_mode=mode, lora_ids=None, **fields)

    def _fill(self, batch, *, raw_bs, padded_bs, **_):
        for name, padding in (("seq_lens", 1), ("seq_lens_cpu", 1), ("out_cache_loc", 0)):
            getattr(self.buffers, name)[:padded_bs] = padding
            getattr(self.buffers, name)[:raw_bs] = getattr(batch, name)
        self.buffers.req_pool_indices[:padded_bs] = 0
        self.buffers.req_pool_indices[:raw_bs] = batch.req_pool_indices

    def _forward(self, input_ids, positions, batch):
        q, k, v = (x[: len(batch.seq_lens)] for x in self.qkv)
        out = self.attn_backend.forward_decode(
            q.flatten(1), k, v, self.server.layer, batch, **self.options
        )
        return LogitsProcessorOutput(next_token_logits=out.clone())


# --- captures and steps of a runner, as tests look at them ----------------------------------------


def captured(server, **options):
    runner = GraphRunner(server, **options)
    runner.capture()
    return runner


def labels(runner):
    return [(key.size, key.variant_label) for key in runner.backend.graphs]


def step(runner, grown, cache=None, observe=True, **fields):
    """One step of all requests: the batch, q, output, whether a graph replayed, stock's calls."""
    batch = runner.live(grown)
    vars(batch).update(fields)
    before = len(runner.server.stock.calls)
    if observe:
        runner.server.observe(batch, cache)
    q, out, replayed = runner.step(batch)
    return batch, q, out, replayed, runner.server.stock.calls[before:]


def assert_prefix(runner, grown, graph=True, **fields):
    batch, q, out, replayed, calls = step(runner, grown, **fields)
    torch.testing.assert_close(out, runner.server.expected(q, batch), rtol=1e-5, atol=1e-5)
    assert replayed is graph and not calls


def assert_stock(runner, grown, **options):
    _, _, out, replayed, calls = step(runner, grown, **options)
    assert (out == 7.0).all() and replayed and calls == STOCK_STEP
