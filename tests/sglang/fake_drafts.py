"""Rounds of draft steps as SGLang's EAGLE worker runs them, without a GPU: its own draft() and
draft_forward(), and the backend that its own factory makes, hooks on.

The draft model is two layers of attention that look at what they are answered. KV that no correct
step reads is NaN: tokens that were rejected, slots ahead of the round, what nobody wrote.
"""

from inspect import signature
from types import SimpleNamespace

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.speculative import eagle_worker_v2
from sglang.srt.speculative.draft_utils import DraftBackendFactory
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sgl_prefix_attn.execute.full_attention import full_attention
from sgl_prefix_attn.patches import batch_requests
from sgl_prefix_attn.plugin import entry_point
from tests.sglang.fake_draft_graphs import DraftGraphRunner
from tests.sglang.fake_server import PLAIN_SERVER, Batch, Pool, Server, Stock

STEPS = 4  # tokens that a round drafts: three decode steps
HQ, HKV, D, LAYERS = 6, 2, 16, 2  # of the draft model
VOCAB = 5


class StockStep(Stock):
    """One step's stock attention, which answers 7; calls are shared by all steps of a round."""

    def __init__(self, calls, trace):
        super().__init__(trace)
        self.calls = calls

    def get_cuda_graph_seq_len_fill_value(self):
        return 1


class StockRound:
    """SGLang's backend of a round, of so many steps; begun: positions and slots of each start."""

    def __init__(self, steps, trace):
        self.calls, self.begun = [], []
        self.attn_backends = [StockStep(self.calls, trace) for _ in range(steps)]

    def init_forward_metadata(self, batch):
        self.calls.append("metadata")
        self.begun.append((batch.positions.clone(), batch.out_cache_loc.clone()))

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        self.calls.append("out_graph:capture" if in_capture else "out_graph")

    def init_forward_metadata_in_graph(self, batch):
        self.calls.append("in_graph")

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        self.calls.append("graph_state")

    def on_after_cuda_graph_warmup(self):
        pass


class Model(torch.nn.Module):
    """Layers whose q, k and v are of the step and the layer alone; answers: (step, q, out,
    expected) of each layer of the live rows."""

    def __init__(self, drafts):
        super().__init__()
        layers = [RadixAttention(HQ, D, D**-0.5, HKV, layer_id=i) for i in range(LAYERS)]
        self.layers = torch.nn.ModuleList(layers)
        self.drafts, self.answers = [drafts], []

    def forward(self, batch):
        (drafts,) = self.drafts
        step = drafts.backend.attn_backends.index(get_attn_backend())
        rows = len(batch.seq_lens)
        for layer in self.layers:
            generator = torch.Generator().manual_seed(10 * step + layer.layer_id)
            q, k, v = (torch.randn(16, h, D, generator=generator)[:rows] for h in (HQ, HKV, HKV))
            q = q.flatten(1)
            out = get_attn_backend().forward(q, k, v, layer, batch, **drafts.options)
            if drafts.live is not None:
                n = drafts.live.batch_size
                self.answers.append((step, out[:n].clone(), drafts.expected(step, q[:n])))
                assert out.isfinite().all(), "a model may take statistics over padding"
        return SimpleNamespace(
            logits_output=SimpleNamespace(
                next_token_logits=torch.zeros(rows, VOCAB), hidden_states=torch.zeros(rows, 2)
            )
        )


class Drafts:
    """A server whose draft model drafts for `requests` requests that share 40 tokens, and one that
    shares nothing and has nothing committed but its first token."""

    def __init__(self, monkeypatch, requests=3, steps=STEPS, topk=1, tp_size=1, env=(), **server):
        for name, value in (("PREFILL", "1"), *env):
            monkeypatch.setenv(f"PREFIX_ATTN_{name}", value)
        defaults = {
            "speculative_algorithm": "EAGLE",
            "speculative_eagle_topk": topk,
            "speculative_draft_window_size": None,
            "speculative_use_rejection_sampling": False,
        }
        for name, value in (defaults | server).items():
            monkeypatch.setitem(PLAIN_SERVER, name, value)
        self.server = Server(monkeypatch, prefill="prefix", tp_size=tp_size)
        self.world = self.server.world
        del self.world.reqs[:]
        for i in range(requests - 1):
            self.world.add([0] * 40 + [1 + i], tail=60)
        self.world.add([], tail=60)
        self.grown = torch.ones(requests, dtype=torch.int64)
        entry_point.register()
        HookRegistry.apply_hooks()
        self.server.publish_config()
        self.monkeypatch, self.options, self.trace = monkeypatch, {}, []
        self.live = None
        self.steps, self.model = steps, Model(self)
        self.pool = Pool(4096)
        self.pool.k = torch.full((4096, HKV, D), float("nan"))
        self.pool.v = self.pool.k.clone()
        self.pool.k[0] = self.pool.v[0] = 0.0  # padding is written there
        self.runner = self._draft_runner()
        self.stock = StockRound(steps - 1, self.trace)
        factory = object.__new__(DraftBackendFactory)
        vars(factory).update(
            draft_model_runner=self.runner, topk=topk, speculative_num_steps=steps,
            qsa_profile=None, _create_backend=lambda *args, **kwargs: self.stock,
        )  # fmt: skip
        self.backend = self.runner.draft_attn_backend = factory.create_decode_backend()
        self.worker = self._worker(topk)
        self.graphs = None
        if self.plans:
            run = self.backend.lane.executor.run

            def traced(layer):
                self.trace.append("prefix")
                run(layer)

            self.backend.lane.executor.run = traced

    @property
    def plans(self) -> bool:
        """Whether SGLang's backend has plans beside it."""
        return self.backend is not self.stock

    def _draft_runner(self):
        target = self.server.runner
        return SimpleNamespace(
            **{
                **vars(target),
                "is_draft_worker": True,
                "model": self.model,
                "token_to_kv_pool": self.pool,
                "canary_manager": None,
                "device_timer": None,
                "spec_algorithm": SpeculativeAlgorithm.EAGLE,
                "model_config": SimpleNamespace(
                    hf_config=SimpleNamespace(architectures=["LlamaForCausalLMEagle"]),
                    has_attention_sinks=False,
                    context_len=4096,
                    hf_text_config=None,
                    vocab_size=VOCAB,
                    model_is_mrope=False,
                ),
                "kv_index_translator": SimpleNamespace(bind_runner_slots=lambda batch: None),
                "forward": lambda batch: self.model(batch),
            }
        )

    def _worker(self, topk):
        worker = object.__new__(eagle_worker_v2.EagleDraftWorker)
        rows = torch.zeros(16, self.steps, dtype=torch.int64)
        for name, value in {
            "draft_runner": self.runner,
            "draft_attn_backend": self.backend,
            "req_to_token_pool": self.runner.req_to_token_pool,
            "target_worker": SimpleNamespace(model_runner=self.server.runner),
            "cuda_graph_runner": None,
            "topk": topk,
            "speculative_num_steps": self.steps,
            "speculative_num_draft_tokens": self.steps + 1,
            "hot_token_id": None,
            "index_share_for_mtp_iteration": False,
            "seed_dsa_topk_from_draft_extend": False,
            "tree_mask_mode": None,
            "device": "cpu",
            "_topk1_parents_prealloc": rows,
            "_topk1_score_indices_prealloc": rows,
        }.items():
            setattr(worker, name, value)
        parameters = signature(eagle_worker_v2.prepare_for_draft).parameters
        plans_slots = "target_translator" in parameters  # not in every release

        def prepare(draft_input, pool, batch, runner, *args, **kwargs):
            made = self.forward_batch(batch)
            runs = runner is not None and runner.can_run_graph(made)
            return (made, runs, None) if plans_slots else (made, runs)

        self.monkeypatch.setattr(eagle_worker_v2, "prepare_for_draft", prepare)
        self.monkeypatch.setattr(
            eagle_worker_v2, "build_eagle_verify_input", lambda *args, **kwargs: args[4]
        )
        return worker

    def schedule_batch(self, **changes):
        committed = torch.from_numpy(self.world.seq_lens(0)) + self.grown
        fields = {
            "reqs": self.world.reqs, "tree_cache": self.world.cache, "seq_lens": committed,
            "req_to_token_pool": self.runner.req_to_token_pool, "spec_info": None,
        }  # fmt: skip
        return SimpleNamespace(**fields | changes)

    def forward_batch(self, batch):
        """As prepare_for_draft() makes it: the slots of a request's round one after another."""
        n = len(batch.reqs)
        rows = torch.tensor([req.req_pool_idx for req in batch.reqs])
        ahead = batch.seq_lens[:, None] + torch.arange(self.steps)
        made = Batch(
            forward_mode=ForwardMode.DECODE,
            batch_size=n,
            input_ids=None,
            seq_lens=batch.seq_lens.clone(),
            seq_lens_cpu=batch.seq_lens.clone(),
            seq_lens_sum=int(batch.seq_lens.sum()),
            req_pool_indices=rows,
            out_cache_loc=self.world.req_to_token[rows[:, None], ahead].long().flatten(),
            positions=batch.seq_lens.clone(),
            spec_info=EagleDraftInput(
                topk_p=torch.ones(n, 1),
                topk_index=torch.zeros(n, 1, dtype=torch.int64),
                hidden_states=torch.zeros(n, 2),
                capture_hidden_mode=CaptureHiddenMode.LAST,
                num_tokens_per_req=1,
            ),
            mark_forward_metadata_ready=lambda: None,
        )
        vars(made).update(vars(batch).get("forward", {}))
        if not vars(batch).get("unseen"):
            batch_requests.hook(made, ForwardBatch, batch, self.runner)
        self.live = SimpleNamespace(batch_size=n, rows=rows, seq_lens=batch.seq_lens.clone())
        return made

    def expected(self, step, q):
        """Attention to all committed tokens of each request and those drafted up to the step."""
        live = self.live
        out, _ = full_attention(
            q.view(-1, HQ, D), self.pool.k, self.pool.v, self.world.req_to_token, live.rows,
            live.seq_lens + step + 1, sm_scale=D**-0.5,
        )  # fmt: skip
        return out.reshape(len(q), -1).float()

    def round(self, accepted=1, **changes):
        """One round, and so many tokens accepted by each request; the answers of its layers."""
        batch = self.schedule_batch(**changes)
        self._commit(batch.seq_lens)
        self.model.answers.clear()
        self.worker.draft(batch)
        self.live = None
        self.grown += torch.as_tensor(accepted)
        return list(self.model.answers)

    def assert_right(self, accepted=1, graph=False, **changes):
        """A round over a plan: every layer of every step right, nothing of it stock."""
        calls, kernels = len(self.stock.calls), len(self.trace)
        answers = self.round(accepted, **changes)
        assert [step for step, *_ in answers] == sorted(list(range(self.steps - 1)) * LAYERS)
        for _, out, expected in answers:
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        assert self.stock.calls[calls:] == []
        assert set(self.trace[kernels:]) == {"prefix"}
        if graph:
            assert self.graphs.replayed.pop().variant_label == "prefix"

    def error(self, **changes) -> float:
        """The largest error of a round; NaN counts as infinite."""
        errors = [(out - expected).abs().max() for _, out, expected in self.round(**changes)]
        return float(torch.stack(errors).nan_to_num(nan=float("inf")).max())

    def _commit(self, lens):
        """Fill the KV of committed tokens, and poison what lies ahead of them."""
        generator = torch.Generator().manual_seed(int(lens.sum()))
        for req, length in zip(self.world.reqs, lens.tolist(), strict=True):
            row = self.world.req_to_token[req.req_pool_idx].long()
            ahead = row[length : length + 20]
            self.pool.k[ahead] = self.pool.v[ahead] = float("nan")
            slots = row[:length]
            slots = slots[self.pool.k[slots, 0, 0].isnan()]
            for buffer in (self.pool.k, self.pool.v):
                buffer[slots] = torch.randn(len(slots), HKV, D, generator=generator)

    # --- in graphs -------------------------------------------------------------------------------

    def capture(self, sizes=(1, 2, 4)):
        """Capture draft graphs; from now on rounds replay them."""
        self.graphs = self.worker.cuda_graph_runner = DraftGraphRunner(self, sizes)
        self.graphs.capture()
        return self.graphs
