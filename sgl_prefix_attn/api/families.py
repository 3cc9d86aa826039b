"""A family of kernels with a planner of its rates."""

import torch

from sgl_prefix_attn.execute.backends.choice import new_backend
from sgl_prefix_attn.execute.backends.kernel_backend import KernelBackend
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.predict.startup import default_rates
from sgl_prefix_attn.records import CALIBRATED, HeadConfig


def kernels_and_planner(
    family: str,
    heads: HeadConfig,
    dtype: torch.dtype,
    device: torch.device,
    page_size: int,
    strategy: str = CALIBRATED,
    kv_dtype: torch.dtype | None = None,
    part_tokens: int = 0,
) -> tuple[KernelBackend, Planner]:
    """Return what runs a family's kernels, and what plans for them with a server's rates.
    kv_dtype: of the KV cache, None like `dtype`; part_tokens: of aligned plans, else 0. Raises
    ValueError as new_backend and Planner."""
    backend = new_backend(family, device, heads, dtype, kv_dtype=kv_dtype, part_tokens=part_tokens)
    rates = default_rates(family, device, heads, kv_dtype or dtype, page_size)
    return backend, backend.planner(rates, strategy=strategy)
