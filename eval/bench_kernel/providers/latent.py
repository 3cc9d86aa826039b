"""Decode attention over latent KV, absorbed, that SGLang would run: `fa3`, `flashinfer:mla` and
`flashmla`, called as its backends do; each is found on the path of the Python that runs it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from types import ModuleType

import torch

from eval.bench_kernel.case import Case
from eval.bench_kernel.providers.fa3 import FlashAttention3
from eval.bench_kernel.providers.planned import Server
from eval.bench_kernel.providers.provider import Provider, Runnable
from sgl_prefix_attn.tools.calibrate.stock_decode import FlashAttention3LatentDecode

_WORKSPACE_BYTES = 256 << 20
_FLASH_MLA_PAGE = 64
# Where FlashMLA may be: what SGLang 0.5.23 calls, the kernels of releases before (which its
# sgl_kernel may still hold), DeepSeek's own package.
_FLASH_MLA = (
    "sglang.kernels.ops.attention.flash_mla_interface",
    "sgl_kernel.flash_mla",
    "flash_mla",
)


def _fa3(case: Case) -> Runnable:
    decode = FlashAttention3LatentDecode(case.stock_batch)
    return Runnable(lambda layer: decode.run(case.q, case.kv(layer)))


def _flashinfer(case: Case) -> Runnable:
    """It takes queries and caches in two parts, values and rope."""
    import flashinfer

    dim, pages, outs = case.heads.value_dim, case.page_table, case.new_out()
    q, q_rope = case.q[..., :dim].contiguous(), case.q[..., dim:].contiguous()
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.int8, device=case.device)
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace, backend="auto")
    plan = partial(
        wrapper.plan, case.starts, case.starts * pages.shape[1], pages.view(-1), case.seq_lens,
        case.heads.num_qo_heads, dim, q_rope.shape[-1], case.page_size, False, case.sm_scale,
        case.dtype, case.dtype,
    )  # fmt: skip

    def run(layer: int) -> torch.Tensor:
        rows, values = case.kv(layer)
        return wrapper.run(q, q_rope, values[:, :, 0], rows[:, :, 0, dim:], out=outs[layer])

    plan()
    return Runnable(run, plan)


def _flash_mla(case: Case) -> Runnable:
    module, pages, schedule = flash_mla(), case.page_table, None

    def plan() -> None:
        nonlocal schedule
        schedule = module.get_mla_metadata(case.seq_lens, case.heads.num_qo_heads, 1)

    def run(layer: int) -> torch.Tensor:
        rows, _ = case.kv(layer)
        out, _ = module.flash_mla_with_kvcache(
            case.q[:, None], rows, pages, case.seq_lens, case.heads.value_dim, *schedule,
            softmax_scale=case.sm_scale, causal=True,
        )  # fmt: skip
        return out[:, 0]

    plan()
    return Runnable(run, plan, {"module": module.__name__})


def flash_mla() -> ModuleType:
    """Import FlashMLA. Raises ImportError, or whatever a broken build of it raises."""
    for name in _FLASH_MLA[:-1]:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return importlib.import_module(_FLASH_MLA[-1])


class FlashMla(Provider):
    def __init__(self):
        super().__init__("flashmla", f"any of {', '.join(_FLASH_MLA)}", _flash_mla)

    def load(self) -> ModuleType:
        return flash_mla()

    def page_size(self, requested: int) -> int:
        return _FLASH_MLA_PAGE


PROVIDERS: dict[str, Callable[[], Provider]] = {
    "prefix": Server, "fa3": partial(FlashAttention3, runnable=_fa3),
    "flashinfer:mla": partial(Provider, "flashinfer:mla", "flashinfer", _flashinfer),
    "flashmla": FlashMla,
}  # fmt: skip
