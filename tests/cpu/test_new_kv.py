"""New tokens in a cache of float8_e4m3fn: in torch, in Triton's interpreter, and compiled."""

from __future__ import annotations

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sgl_prefix_attn.execute.backends import new_kv
from sgl_prefix_attn.execute.backends.new_kv import store_narrow
from sgl_prefix_attn.execute.backends.torch_backend import TorchBackend
from sgl_prefix_attn.execute.self_test import check_kernels, every_plan
from sgl_prefix_attn.kernels.store_kv import store_kv_kernel
from sgl_prefix_attn.records import HeadConfig
from tests.cpu.test_hopper_launches import Recorder
from tests.support.interpreter_process import run_interpreted
from tests.support.problems import E4M3


def test_in_the_interpreter():
    run_interpreted("interpreted_new_kv.py")


def test_on_a_cpu_they_are_rounded_as_torch_does_and_stay_as_they_are():
    k, v = torch.randn(2, 3, 2, 8, generator=torch.Generator().manual_seed(0))
    given = k.clone(), v.clone()
    caches = [torch.zeros(9, 2, 8, dtype=E4M3) for _ in given]
    slots = torch.tensor([4, 0, 7, 8])  # one is padding's
    store_narrow(k, v, *caches, slots, 0.7, 1.7)
    for x, cache, new, scale in zip((k, v), caches, given, (0.7, 1.7), strict=True):
        assert torch.equal(x, new)
        assert torch.equal(cache[slots[:3]].float(), (new / scale).to(E4M3).float())
        assert not cache[8].float().any()


@pytest.mark.parametrize("factor", [1.1, torch.nan])
def test_the_self_test_finds_keys_that_are_stored_wrong(factor, monkeypatch):
    heads = HeadConfig(4, 2, 16)
    backend = TorchBackend(heads, torch.bfloat16, torch.device("cpu"))
    check_kernels(backend, list(every_plan(backend))[:1], 0.0, E4M3)

    def wrong(k, v, *rest):
        store_narrow(k, v * factor, *rest)

    monkeypatch.setattr("sgl_prefix_attn.execute.self_test.store_narrow", wrong)
    with pytest.raises(RuntimeError, match="KV that is stored is off"):
        check_kernels(backend, list(every_plan(backend))[:1], 0.0, E4M3)


@pytest.mark.parametrize("pdl", [False, True])
def test_a_dependent_launch_is_of_a_kernel_that_waits(pdl, monkeypatch):
    """And no other, which would read keys before they are there."""

    found = []
    monkeypatch.setattr(new_kv, "store_kv_kernel", Recorder("store", found))
    k, cache = torch.zeros(2, 1, 16), torch.zeros(4, 1, 16, dtype=E4M3)
    new_kv.launch_store(k, k, cache, cache, torch.arange(2), 1.0, 1.0, pdl)
    ((_, options),) = found
    assert options["PDL"] == options["launch_pdl"] == pdl


@pytest.mark.parametrize("arch", [89, 90, 100, 120])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_whole_vectors_are_read_and_rounded_in_pairs(dtype, arch):
    names = store_kv_kernel.arg_names
    signature = dict.fromkeys(names, "i32") | {"STEP": "constexpr", "PDL": "constexpr"}
    signature |= {"k_ptr": f"*{dtype}", "v_ptr": f"*{dtype}", "slots_ptr": "*i64"}
    signature |= {"k_cache_ptr": "*fp8e4nv", "v_cache_ptr": "*fp8e4nv"}
    signature |= {"k_scale": "fp32", "v_scale": "fp32"}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, kind in enumerate(signature.values())
        if kind not in ("fp32", "constexpr")
    }
    pdl = arch >= 90
    source = ASTSource(store_kv_kernel, signature, {"STEP": 1024, "PDL": pdl}, aligned)
    ptx = triton.compile(source, target=GPUTarget("cuda", arch, 32)).asm["ptx"]
    assert "ld.global.v4" in ptx, "not 16 bytes of a row at a time"
    assert "div.rn.f32" in ptx and "cvt.rn.satfinite.e4m3x2" in ptx
    assert not pdl or ptx.index("griddepcontrol.wait") < ptx.index("ld.global"), "read too early"
    assert ("griddepcontrol" in ptx) == pdl
