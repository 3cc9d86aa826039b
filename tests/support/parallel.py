"""Stands in for SGLang's ModelRunner and for what sglang_config.parallel() returns."""

from types import SimpleNamespace

import torch


def ranks(tp_size=1, group=None):
    """Rank 0 of so many tensor-parallel ranks, and nothing else in parallel."""
    return SimpleNamespace(
        tp_rank=0,
        tp_size=tp_size,
        tp_group=SimpleNamespace(cpu_group=group),
        pp_rank=0,
        pp_size=1,
        moe_ep_rank=0,
        attn_dp_size=1,
        dcp_enabled=False,
    )


def model_runner(device="cpu", dtype=torch.float32, max_batch=4, max_tokens=256):
    """What building planner and kernels reads of SGLang's ModelRunner."""
    return SimpleNamespace(
        device=device,
        dtype=dtype,
        kv_cache_dtype=dtype,
        page_size=1,
        req_to_token_pool=SimpleNamespace(size=max_batch),
        max_total_num_tokens=max_tokens,
        model_config=SimpleNamespace(context_len=max_tokens),
        server_args=SimpleNamespace(enable_deterministic_inference=False),
    )
