"""SGLang's own EAGLEDraftCudaGraphRunner over fake buffers and fake graphs, without a GPU."""

from types import SimpleNamespace

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.speculative import eagle_draft_cuda_graph_runner as sglang_runner

from tests.sglang.fake_graph_runner import Device, Graphs

_FIELDS = sglang_runner.EagleDraftInputBuffers.__annotations__
_NOT_IN_USE = (
    "rids_int", "bootstrap_room_ids_int", "draft_probs", "sampling_seed", "dsa_seed_topk",
    "global_num_tokens_gpu", "global_num_tokens_for_logprob_gpu",
)  # fmt: skip


class DraftGraphRunner(sglang_runner.EAGLEDraftCudaGraphRunner):
    """SGLang's runner of draft graphs over fake graphs, of the given batch sizes."""

    def __init__(self, drafts, sizes):
        self.replayed = []  # keys
        self.eagle_worker, self.model_runner = drafts.worker, drafts.runner
        self.device, self.topk = "cpu", 1
        self.speculative_num_steps = steps = drafts.steps
        self.draft_attn_backend = self.attn_backend = drafts.backend
        self.capture_forward_mode = ForwardMode.DECODE
        self.capture_hidden_mode = CaptureHiddenMode.LAST
        self.captured_req_width = self.seq_len_fill_value = 1
        self.capture_bs, self.max_bs = sorted(sizes), max(sizes)
        self.require_mlp_tp_gather = self.require_attn_tp_gather = False
        self.require_mlp_sync = self.require_gathered_buffer = False
        self.disable_padding = self.enable_pdmux = False
        self.deepep_adapter = SimpleNamespace(capture=lambda **_: None, replay=lambda: None)
        self.backend = Graphs(drafts.trace)
        self.device_module = Device(self.backend)
        self.extend_seq_lens_cpu = [1] * self.max_bs
        self.temperatures = torch.ones(self.max_bs, 1)
        self.top_ks = torch.ones(self.max_bs, dtype=torch.int32)
        ints = {"input_ids": 1, "req_pool_indices": 1, "positions": 1, "out_cache_loc": steps}
        self.buffers = sglang_runner.EagleDraftInputBuffers(
            **{n: torch.zeros(self.max_bs * w, dtype=torch.int64) for n, w in ints.items()},
            **{n: None for n in _NOT_IN_USE if n in _FIELDS},
            mrope_positions=torch.zeros(3, self.max_bs, dtype=torch.int64),
            seq_lens=torch.ones(self.max_bs, dtype=torch.int64),
            seq_lens_cpu=torch.ones(self.max_bs, dtype=torch.int64),
            extend_seq_lens=torch.ones(self.max_bs, dtype=torch.int32),
            topk_p=torch.zeros(self.max_bs, 1),
            topk_index=torch.zeros(self.max_bs, 1, dtype=torch.int64),
            hidden_states=torch.zeros(self.max_bs, 2),
        )
        self.draft_attn_backend.init_cuda_graph_state(self.max_bs, self.max_bs)

    def capture(self):
        """As SGLang's _capture_one_stream: the largest size first."""
        for size in reversed(self.capture_bs):
            self.capture_one_shape(size, None)

    def _replay_graph(self, key, batch):
        self.replayed.append(key)
        return self.backend.replay(key, batch)
