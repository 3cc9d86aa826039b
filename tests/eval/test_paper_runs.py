"""Runs of eval.papers on the CPU: interpreters and fakes stand for the kernels."""

import contextlib
import sys
import types
from dataclasses import replace

import numpy as np
import pytest
import torch

from eval import provenance
from eval.bench_kernel import case, turns
from eval.bench_kernel.case import build_batch_case, build_case
from eval.bench_kernel.floor import Rates
from eval.bench_kernel.oracle import Oracle, Wrong, attend_rows, some_rows
from eval.bench_kernel.providers import planned
from eval.bench_kernel.providers.fa3 import flash_attention3
from eval.bench_kernel.providers.flashinfer import flashinfer_decode
from eval.bench_kernel.providers.planned import PlannedRunnable
from eval.bench_kernel.trees import Tree
from eval.papers import __main__ as command
from eval.papers import measure
from eval.papers.batches import unshared
from eval.papers.experiment import LLAMA2, LLAMA3, Run
from eval.papers.experiments import EXPERIMENTS
from sgl_prefix_attn.records import HeadConfig

CPU = torch.device("cpu")
RATES = Rates(1e12, 1e15, "test")
HEADS = HeadConfig(7, 1, 16)
RAGGED = unshared("ragged", [1, 63, 37, 130])


def ragged_case(page_size):
    tokens = RAGGED.unique_tokens
    return build_batch_case(RAGGED.paths, tokens, HEADS, page_size, torch.bfloat16, CPU)


# --- ours ---------------------------------------------------------------------------------------
@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(case, "_MOST_POOLS", 2)
    monkeypatch.setattr(turns, "ROUNDS", 1)
    monkeypatch.setattr(turns, "_PLANS", 1)


def test_every_provider_has_a_row_and_ours_is_judged_and_timed(small):
    ours, flashinfer, fa3 = measure.measure(Run(RAGGED, HEADS, 16), RATES, torch.bfloat16, CPU)
    assert ours["family"] == "portable"
    assert ours["status"] == "ok" and ours["us"] > 0 and ours["error"] < 2 * ours["error_torch"]
    assert ours["kv_tokens_read"] == ours["unique_tokens"] == 231
    assert ours["server_runs"] == "prefix" and "launches" not in ours
    for row in (flashinfer, fa3):
        assert row["status"].startswith("unavailable: needs an NVIDIA GPU") and "us" not in row


class Faulty(PlannedRunnable):
    """Adds to one value of the longest request from the `good`th call on."""

    good = 0

    def __init__(self, case):
        super().__init__(case)
        self.calls = 0

    def run(self, layer):
        out = super().run(layer)
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls > self.good:
            out[3, 0, 0] += 3
        return out


@pytest.mark.parametrize(
    ("good", "status"), [(0, "wrong: first run, layer 0: "), (12, "wrong: timed, layer 0: ")]
)
def test_a_wrong_output_has_no_time(small, monkeypatch, good, status):
    monkeypatch.setattr(planned, "PlannedRunnable", Faulty)
    monkeypatch.setattr(Faulty, "good", good)
    (row,) = measure.measure(Run(RAGGED, HEADS), RATES, torch.bfloat16, CPU, ("prefix",))
    assert row["status"].startswith(status) and "us" not in row


def test_what_a_kernel_raises_is_its_row(small, monkeypatch):
    def breaks(self, case):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(PlannedRunnable, "__init__", breaks)
    (row,) = measure.measure(Run(RAGGED, HEADS), RATES, torch.bfloat16, CPU, ("prefix",))
    assert row["status"] == "failed: RuntimeError: no such kernel"


@pytest.mark.parametrize("page_size", [1, 16])
def test_slots_that_no_request_owns_hold_nan(page_size):
    made = ragged_case(page_size)
    owned = np.concatenate(
        [made.req_to_token[i, :n].numpy() for i, n in enumerate(RAGGED.paths.seq_lens)]
    )
    assert np.unique(owned).size == owned.size == RAGGED.tokens
    unowned = np.setdiff1d(np.arange(made.k[0].shape[0]), owned)
    assert unowned.size and made.k[0][unowned].isnan().all() and made.v[1][unowned].isnan().all()
    assert not made.k[0][owned].isnan().any()
    assert set(made.req_to_token[0, 1:].tolist()) <= set(unowned.tolist())


def test_kernels_are_counted_in_a_graph_and_nowhere_else(small, monkeypatch):
    (row,) = measure.measure(
        Run(RAGGED, HEADS, count_launches=True), RATES, torch.bfloat16, CPU, ("prefix",)
    )
    assert row["status"] == "ok" and row["launches"] is None  # no GPU, no graph
    runs = []

    class Graph:
        def __init__(self, keep_graph):
            assert keep_graph

        def raw_cuda_graph(self):
            return 77

    class Runtime:
        class cudaGraphNodeType:
            cudaGraphNodeTypeKernel, cudaGraphNodeTypeMemset = 0, 2

        @staticmethod
        def cudaGraphGetNodes(graph, count=0):
            assert graph == 77
            return 0, list(range(count)), 3

        @staticmethod
        def cudaGraphNodeGetType(node):
            return 0, (0, 2, 0)[node]

    monkeypatch.setitem(sys.modules, "cuda", types.SimpleNamespace())
    bindings = types.SimpleNamespace(runtime=Runtime)
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
    assert measure.count_kernels(runs.append) == 2 and runs == [0]


# --- stock kernels' arguments -------------------------------------------------------------------
class FakeFlashInfer:
    """Attends in torch over what FlashInfer's decode wrapper was planned with."""

    def __init__(self, workspace, layout, **buffers):
        assert layout == "NHD" and buffers["use_cuda_graph"]

    def plan(self, indptr, indices, last, num_qo, num_kv, head_dim, page_size, **dtypes):
        self.args = indptr, indices, last, page_size

    def run(self, q, kv, out):
        indptr, indices, last, page_size = self.args
        k, v = (cache.flatten(0, 1) for cache in kv)
        for i in range(q.shape[0]):
            pages = indices[indptr[i] : indptr[i + 1]].long()
            slots = (pages[:, None] * page_size + torch.arange(page_size)).flatten()
            slots = slots[: (len(pages) - 1) * page_size + int(last[i])][None]
            scale = q.shape[2] ** -0.5
            out[i] = attend_rows(q[i : i + 1], k, v, slots, scale, torch.float32, q.dtype)
        return out


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("ragged", [True, False])
def test_flashinfer_is_planned_with_every_requests_length(monkeypatch, ragged, page_size):
    fake = types.SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=FakeFlashInfer)
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    if ragged:
        made = ragged_case(page_size)
    else:
        made = build_case(Tree.parse("1,3_32,21"), HEADS, page_size, torch.bfloat16, CPU)
    runnable, oracle = flashinfer_decode(made), Oracle(made, some_rows(made))
    outs = [runnable.run(layer).clone() for layer in range(made.num_layers)]
    assert oracle.judge(outs, "all") <= 2 * oracle.error_torch
    with pytest.raises(Wrong, match="layer 0"):  # another layer's KV is noticed
        oracle.judge([outs[1], *outs[1:]], "all")


def test_fa3_is_called_with_every_requests_length(monkeypatch):
    given = []
    module = types.SimpleNamespace(
        flash_attn_with_kvcache=lambda **kwargs: given.append(kwargs),
        get_scheduler_metadata=lambda **kwargs: given.append(kwargs) or torch.zeros(3),
    )
    monkeypatch.setitem(sys.modules, "sgl_kernel", types.SimpleNamespace(flash_attn=module))
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_attn", module)
    made = ragged_case(16)
    flash_attention3(made).run(0)
    schedule, call = given
    assert (schedule["batch_size"], schedule["max_seqlen_k"]) == (4, 130)
    assert call["cache_seqlens"].tolist() == [1, 63, 37, 130]
    assert call["page_table"].shape == (4, 9) and call["page_table"][3].unique().numel() == 9


# --- the command --------------------------------------------------------------------------------
def test_every_run_is_measured_and_written(small, monkeypatch, tmp_path, capsys):
    asked = []

    def measured(run, rates, dtype, device):
        asked.append((run.heads, run.batch.name))
        return [measure.row(run, name, RATES) | {"us": 1.0} for name in measure.PROVIDERS]

    monkeypatch.setattr(command.measure, "measure", measured)
    monkeypatch.setattr(command, "rates_of", lambda device: RATES)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    runs = tuple(Run(RAGGED, heads) for heads in (LLAMA2, LLAMA3))
    experiment = replace(EXPERIMENTS["prefetch-models"], runs=runs)
    monkeypatch.setattr(command, "find", lambda names: [experiment])
    out = tmp_path / "out.json"
    assert command.main(["prefetch-models", "--json", str(out)]) == 0
    assert asked == [(LLAMA2, "ragged"), (LLAMA3, "ragged")]
    assert len(provenance.load(out)["rows"]) == 6
    assert "prefetch-models  32/8  ragged: prefix 1.0  flashinfer 1.0" in capsys.readouterr().out
