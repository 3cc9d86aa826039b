"""Which kernels a device gets, and what they say about models that they cannot run."""

import sys

import pytest
import torch

from sgl_prefix_attn.execute.backends.choice import new_backend, why_no_backend, why_no_hopper
from sgl_prefix_attn.execute.backends.family import (
    AUTO,
    HOPPER,
    PORTABLE,
    Family,
    choose_family,
)
from sgl_prefix_attn.execute.backends.portable_backend import PortableBackend
from sgl_prefix_attn.execute.backends.torch_backend import TorchBackend
from sgl_prefix_attn.records import STRATEGIES, HeadConfig

CPU, GPU = torch.device("cpu"), torch.device("cuda")
HEADS = HeadConfig(32, 8, 128)


def test_the_device_decides(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert type(new_backend(PORTABLE, CPU, HEADS, torch.float32)) is TorchBackend
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert type(new_backend(PORTABLE, CPU, HEADS, torch.bfloat16)) is PortableBackend


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


@pytest.mark.parametrize("head_dim", [16, 80, 128, 256])
def test_every_group_that_is_said_to_run_has_kernels(head_dim):
    for group in range(1, 129):
        heads = HeadConfig(group, 1, head_dim)
        assert why_no_backend(GPU, heads, torch.bfloat16) is None
        assert PortableBackend.config_for(heads).tile_rows >= group
        assert new_backend(PORTABLE, CPU, heads, torch.float32).tile_rows >= group


@pytest.mark.parametrize("capability", [(7, 0), (7, 5)])
def test_a_gpu_that_is_too_old_runs_stock_attention(capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    why_not = f"compute:{capability[0]}.{capability[1]}"
    assert why_no_backend(GPU, HEADS, torch.float16) == why_not
    with pytest.raises(ValueError, match=why_not):
        new_backend(PORTABLE, GPU, HEADS, torch.float16)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_which_gpus_read_caches_of_e4m3(capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    why_not = "kv_dtype:float8_e4m3fn" if capability < (8, 9) else None
    assert why_no_backend(GPU, HEADS, torch.bfloat16, torch.float8_e4m3fn) == why_not
    assert why_no_backend(GPU, HEADS, torch.bfloat16, torch.bfloat16) is None


@pytest.mark.parametrize("device", [CPU, GPU])
@pytest.mark.parametrize("kv_dtype", [torch.float8_e5m2, torch.float4_e2m1fn_x2, torch.float16])
def test_caches_that_no_kernels_read_have_their_reason(device, kv_dtype):
    reason = f"kv_dtype:{str(kv_dtype).removeprefix('torch.')}"
    assert why_no_backend(device, HEADS, torch.bfloat16, kv_dtype) == reason
    assert why_no_backend(device, HEADS, torch.bfloat16, torch.float8_e4m3fn) is None


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
def test_hoppers_kernels_need_one_and_some_shapes(capability, heads, dtype, why_not, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert why_no_hopper(GPU if capability else CPU, heads, dtype) == why_not


@pytest.mark.parametrize(
    ("head_dim", "dtype", "kv_dtype", "runs"),
    [
        (128, torch.bfloat16, torch.float8_e4m3fn, True),
        (64, torch.bfloat16, torch.float8_e4m3fn, True),
        (256, torch.bfloat16, torch.float8_e4m3fn, True),
        (128, torch.float16, torch.float8_e4m3fn, False),
        (128, torch.bfloat16, torch.float8_e5m2, False),
        (128, torch.float16, torch.float16, True),
    ],
)
def test_which_caches_hoppers_kernels_read(head_dim, dtype, kv_dtype, runs, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    why_not = why_no_hopper(GPU, HeadConfig(32, 8, head_dim), dtype, kv_dtype)
    name = str(kv_dtype).removeprefix("torch.")
    assert why_not == (None if runs else f"kv_dtype:{name}")


def test_a_triton_without_gluon_has_no_kernels_of_hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "sgl_prefix_attn.execute.backends.hopper_backend", None)
    assert why_no_hopper(GPU, HEADS, torch.bfloat16).startswith("triton:3.")


@pytest.mark.parametrize(
    ("wanted", "strategy", "why_no_hopper", "family"),
    [
        (AUTO, "calibrated", None, Family(HOPPER)),
        (AUTO, "calibrated", "compute:8.0", Family(PORTABLE, "compute:8.0")),
        (AUTO, "pat", "compute:8.0", Family(PORTABLE, "compute:8.0")),
        (HOPPER, "calibrated", None, Family(HOPPER)),
        (PORTABLE, "calibrated", None, Family(PORTABLE, "kernels:portable")),
        (PORTABLE, "pat", None, Family(PORTABLE, "kernels:portable")),
        (PORTABLE, "pat", "compute:8.0", Family(PORTABLE, "kernels:portable")),
    ],
)
def test_the_family_of_a_server(wanted, strategy, why_no_hopper, family):
    assert choose_family(wanted, strategy, why_no_hopper) == family


def test_kernels_that_are_wanted_and_cannot_run_are_an_error():
    with pytest.raises(ValueError, match=r"PREFIX_ATTN_KERNELS=hopper.*compute:8\.0"):
        choose_family(HOPPER, "calibrated", "compute:8.0")
    with pytest.raises(ValueError, match="auto, hopper or portable; got 'triton'"):
        choose_family("triton", "calibrated", None)


@pytest.mark.parametrize("wanted", [AUTO, HOPPER])
@pytest.mark.parametrize("strategy", sorted({*STRATEGIES} - {"calibrated"}))
def test_a_strategy_never_turns_hoppers_kernels_off_by_itself(wanted, strategy):
    named = f"PREFIX_ATTN_STRATEGY={strategy}.*PREFIX_ATTN_KERNELS=portable"
    with pytest.raises(ValueError, match=named):
        choose_family(wanted, strategy, None)


def test_where_there_are_no_portable_kernels_none_are_advised():
    """Over latent KV."""
    with pytest.raises(ValueError, match=r"PREFIX_ATTN_KERNELS=portable.*\(layers:latent\)"):
        choose_family(PORTABLE, "calibrated", None, "layers:latent")
    with pytest.raises(ValueError, match="PREFIX_ATTN_STRATEGY=pat") as refused:
        choose_family(AUTO, "pat", None, "layers:latent")
    assert "others have no kernels here (layers:latent)" in str(refused.value)
    assert PORTABLE not in str(refused.value)
    assert choose_family(AUTO, "calibrated", None, "layers:latent") == Family(HOPPER)
