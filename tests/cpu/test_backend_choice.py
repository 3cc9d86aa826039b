"""Which kernels a device gets, and what they say about models that they cannot run."""

import sys

import pytest
import torch

from sgl_prefix_attn.execute.backends.choice import (
    backend_class,
    new_backend,
    why_no_backend,
    why_no_row_tiles,
)
from sgl_prefix_attn.execute.backends.family import AUTO, ROW_TILES, TRITON, Family, choose_family
from sgl_prefix_attn.execute.backends.torch_backend import TorchBackend
from sgl_prefix_attn.execute.backends.triton_backend import TritonBackend
from sgl_prefix_attn.execute.executor import PlanExecutor
from sgl_prefix_attn.execute.params import Capacity
from sgl_prefix_attn.kernels import layout
from sgl_prefix_attn.plan.tile_defaults import default_tile_set, gpu_tile_set
from sgl_prefix_attn.records import HeadConfig
from tests.support.forests import path_table, planner
from tests.support.problems import make_problem

CPU, GPU = torch.device("cpu"), torch.device("cuda")
HEADS = HeadConfig(32, 8, 128)


def test_the_device_decides(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert backend_class(GPU) is TritonBackend and backend_class(CPU) is TorchBackend
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backend_class(CPU) is TritonBackend


@pytest.mark.parametrize(
    ("device", "heads", "dtype", "reason"),
    [
        (GPU, HEADS, torch.bfloat16, None),
        (GPU, HEADS, torch.float32, "dtype:float32"),
        (CPU, HEADS, torch.float32, None),
        (GPU, HeadConfig(8, 8, 512), torch.float16, "head_dim:512"),
        (GPU, HeadConfig(8, 8, 8), torch.float16, "head_dim:8"),
        (GPU, HeadConfig(129, 1, 64), torch.float16, "group_size:129"),
        (CPU, HeadConfig(129, 1, 64), torch.float32, "group_size:129"),
        (GPU, HeadConfig(128, 1, 64), torch.float16, None),
    ],
)
def test_a_model_that_cannot_run_has_its_reason(device, heads, dtype, reason):
    assert why_no_backend(device, heads, dtype) == reason


@pytest.mark.parametrize("head_dim", [16, 128, 256])
def test_every_group_that_is_said_to_run_has_tiles(head_dim):
    for group in range(1, 129):
        heads = HeadConfig(group, 1, head_dim)
        assert why_no_backend(CPU, heads, torch.float32) is None
        assert why_no_backend(GPU, heads, torch.bfloat16) is None
        for tile_set in (default_tile_set(CPU, heads), gpu_tile_set(132, heads)):
            tile_set.check_group(group)
            assert new_backend(CPU, heads, torch.float32, tile_set)


@pytest.mark.parametrize(
    ("capability", "heads", "dtype", "why_not"),
    [
        ((9, 0), HEADS, torch.bfloat16, None),
        ((9, 0), HeadConfig(16, 1, 64), torch.float16, None),
        ((9, 0), HeadConfig(32, 1, 64), torch.float16, "group_size:32"),
        ((9, 0), HeadConfig(8, 8, 96), torch.float16, "head_dim:96"),
        ((9, 0), HeadConfig(8, 8, 256), torch.float16, None),
        ((9, 0), HEADS, torch.float32, "dtype:float32"),
        ((8, 0), HEADS, torch.bfloat16, "compute:8.0"),
        ((10, 0), HEADS, torch.bfloat16, "compute:10.0"),
        (None, HEADS, torch.bfloat16, "device:cpu"),
    ],
)
def test_row_tiles_need_hopper_and_some_shapes(capability, heads, dtype, why_not, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert why_no_row_tiles(GPU if capability else CPU, heads, dtype) == why_not


def test_a_triton_without_gluon_has_no_row_tiles(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "sgl_prefix_attn.execute.backends.gluon_backend", None)
    assert why_no_row_tiles(GPU, HEADS, torch.bfloat16).startswith("triton:3.")


@pytest.mark.parametrize(
    ("wanted", "strategy", "why_not_here", "family"),
    [
        (AUTO, "calibrated", None, Family(ROW_TILES)),
        (AUTO, "calibrated", "compute:8.0", Family(TRITON, "compute:8.0")),
        (AUTO, "pat", None, Family(TRITON, "strategy:pat")),
        (AUTO, "pat", "compute:8.0", Family(TRITON, "compute:8.0")),
        (ROW_TILES, "calibrated", None, Family(ROW_TILES)),
        (TRITON, "calibrated", None, Family(TRITON, "kernels:triton")),
        (TRITON, "pat", "compute:8.0", Family(TRITON, "kernels:triton")),
    ],
)
def test_the_family_of_a_server(wanted, strategy, why_not_here, family):
    assert choose_family(wanted, strategy, why_not_here) == family


@pytest.mark.parametrize(
    ("strategy", "why_not_here", "named"),
    [("calibrated", "compute:8.0", "compute:8.0"), ("pat", None, "strategy:pat")],
)
def test_row_tiles_that_are_wanted_and_cannot_run_are_an_error(strategy, why_not_here, named):
    with pytest.raises(ValueError, match=f"SGL_PREFIX_ATTN_KERNELS=row_tiles.*{named}"):
        choose_family(ROW_TILES, strategy, why_not_here)


def test_words_of_another_layout_are_refused():
    problem = make_problem(path_table([(-1, 16)], [0, 0], [3, 4]), HeadConfig(4, 2, 16))
    plan = planner(problem.heads, "naive").plan(problem.paths)
    executor = PlanExecutor(
        TorchBackend(problem.heads, problem.dtype, CPU), Capacity.for_plans(plan)
    )
    executor.load(plan, problem.req_to_token, problem.pool)
    plan.words[layout.H_VERSION] += 1
    with pytest.raises(ValueError, match="layout 2, TorchBackend reads 1"):
        executor.load(plan, problem.req_to_token, problem.pool)
