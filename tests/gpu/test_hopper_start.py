"""Hopper's kernels as a server starts them: room, self-test, and what is left when they fail."""

import sys

import pytest
import torch

from sgl_prefix_attn.execute import self_test_process
from sgl_prefix_attn.execute.backends.choice import why_no_hopper
from sgl_prefix_attn.execute.backends.hopper_backend import HopperBackend
from sgl_prefix_attn.execute.executor import PlanExecutor
from sgl_prefix_attn.execute.self_test import check_kernels, every_plan, self_test_paths
from sgl_prefix_attn.records import FLASHINFER, HeadConfig
from tests.support.gpu_problems import DEVICE, LLAMA, gpu_problem
from tests.support.parallel import model_runner, ranks
from tests.support.problems import assert_attention
from tests.support.running import load, poison, run

HEADS = [LLAMA, HeadConfig(16, 1, 64), HeadConfig(8, 8, 128), HeadConfig(16, 8, 256)]
DEV = torch.device(DEVICE)


@pytest.fixture(autouse=True)
def _hopper():
    if why_no_hopper(DEV, LLAMA, torch.bfloat16) is not None:
        pytest.skip("the row-tile kernel is for sm_90")


@pytest.mark.parametrize("part_tokens", [0, 128])
@pytest.mark.parametrize("soft_cap", [0.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_the_self_test_passes(heads, dtype, soft_cap, part_tokens):
    backend = HopperBackend(heads, dtype, DEV, pdl=True, part_tokens=part_tokens)
    check_kernels(backend, every_plan(backend), soft_cap)


def test_the_self_test_finds_kernels_that_forget_the_newest_token(monkeypatch):
    monkeypatch.setattr(HopperBackend, "append", lambda *args: None)
    backend = HopperBackend(LLAMA, torch.bfloat16, DEV)
    with pytest.raises(RuntimeError, match="off full attention"):
        check_kernels(backend, every_plan(backend), 0.0)


def test_a_workspace_for_a_server_runs_plans_of_any_size():
    """The kernel asks for slots and flags ahead of what a plan has: the room is there."""
    backend = HopperBackend(LLAMA, torch.bfloat16, DEV)
    problem = gpu_problem(self_test_paths())
    capacity = backend.server_capacity(256, problem.k.shape[0], 64)
    made = PlanExecutor(backend, capacity)
    poison(made, problem)
    for plan in every_plan(backend):
        assert capacity.covers(plan)
        load(made, problem, plan)
        out, lse = run(made, problem)
        assert_attention(problem, out, lse)


@pytest.mark.parametrize(("works", "deterministic"), [(True, False), (True, True), (False, False)])
def test_a_server_starts_with_what_works(works, deterministic, monkeypatch, tmp_path):
    """The self-test is a process of its own, which really runs; or one in which nothing works."""
    pytest.importorskip("sglang")
    from sglang.srt.layers.radix_attention import RadixAttention

    from sgl_prefix_attn.engine import build, sglang_config
    from sgl_prefix_attn.settings import Settings

    monkeypatch.setattr(sglang_config, "parallel", ranks)
    monkeypatch.setattr(sglang_config, "options", lambda server_args: server_args)
    monkeypatch.setattr(build, "verdict_folder", lambda: tmp_path)
    if not works:
        monkeypatch.setattr(self_test_process, "_COMMAND", [sys.executable, "-c", "nothing"])
    runner = model_runner(DEVICE, torch.bfloat16, max_batch=256, max_tokens=1 << 16)
    runner.model = torch.nn.Sequential(RadixAttention(32, 128, 0.1, 8, layer_id=0))
    runner.model_config.has_attention_sinks = False
    runner.server_args.enable_deterministic_inference = deterministic
    built = build.build(runner, LLAMA, Settings(), FLASHINFER)
    assert isinstance(built.executor.backend, HopperBackend) == works
    assert bool(built.executor.backend.part_tokens) == deterministic
    (path,) = tmp_path.glob("*.json")
    verdict = self_test_process._read(path)
    assert (verdict.why_not is None) == works
    assert verdict.subject.part_tokens == built.planner.part_tokens
    assert works or "NameError" in verdict.why_not
