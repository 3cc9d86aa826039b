"""Writes new tokens into a KV cache of float8_e4m3fn."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton

from sgl_prefix_attn.kernels.store_kv import store_kv_kernel

_MOST = 1024  # elements that a program has at once


def store_narrow(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write k / k_scale and v / v_scale, the same bits as SGLang, and leave k and v as they are.

    k, v  [rows, Hkv, D] in the model's dtype, values of a dimension of their own; rows may be
          strided
    k_cache, v_cache  float8_e4m3fn [slots, Hkv, D], a slot's elements side by side
    slots  int [>= rows], which may be strided: a draft step's are a column of its round's

    On a GPU more than 448 becomes 448, where torch makes NaN of it.
    """
    if k.is_cuda:
        pdl = _has_dependent_launches(k.device)
        launch_store(k, v, k_cache, v_cache, slots, k_scale, v_scale, pdl)
        return
    for new, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        narrow = (new / scale).to(cache.dtype)
        # bytes: torch assigns no float8 by index
        cache.view(torch.uint8)[slots[: len(new)]] = narrow.view(torch.uint8)


def launch_store(k, v, k_cache, v_cache, slots, k_scale, v_scale, pdl: bool = False) -> None:
    """Do it on a GPU, or in Triton's interpreter, where no launch depends on another (pdl)."""
    k, v = k.flatten(1), v.flatten(1)  # views, but for heads apart
    k_width, v_width = k.shape[1], v.shape[1]
    step = min(_MOST, triton.next_power_of_2(max(k_width, v_width)))
    store_kv_kernel[len(k), 2](
        k, v, k_cache, v_cache, slots, _rounded(k_scale, k.dtype), _rounded(v_scale, v.dtype),
        k.stride(0), v.stride(0), k_cache.stride(0), v_cache.stride(0), slots.stride(0), k_width,
        v_width, STEP=step, PDL=pdl, launch_pdl=pdl,
    )  # fmt: skip


@lru_cache
def _has_dependent_launches(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@lru_cache
def _rounded(scale: float, dtype: torch.dtype) -> float:
    """Return a scale as torch divides by one that a GPU holds."""
    return torch.tensor(scale, dtype=dtype, device="cpu").item()
