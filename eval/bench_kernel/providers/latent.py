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
from eval.bench_kernel.providers.provider import Provider
from sgl_prefix_attn.tools.calibrate.stock_decode import FlashAttention3LatentDecode

_WORKSPACE_BYTES = 256 << 20
_FLASH_MLA_PAGE = 64
# Where FlashMLA may be: SGLang 0.5.17's kernels, a later SGLang's way to a package of its own,
# DeepSeek's own package.
_FLASH_MLA = (
    "sgl_kernel.flash_mla",
    "sglang.kernels.ops.attention.flash_mla_interface",
    "flash_mla",
)


class _Latent:
    """Queries and caches in two parts, values and rope, as these kernels take them."""

    def __init__(self, case: Case):
        self.case, self.dim = case, case.heads.value_dim
        self.q, self.rope = (x.contiguous() for x in self._parts(case.q))
        self.pages = case.pages(case.req_to_token)
        self.starts = torch.arange(case.batch_size + 1, dtype=torch.int32, device=case.device)

    def _parts(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[..., : self.dim], x[..., self.dim :]

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of pages [pages, page_size, 1, ...]."""
        return self._parts(self.case.paged(self.case.k[layer]))

    def plan(self) -> None:
        """Nothing that a step would do on the host."""


class FlashAttention3Latent:
    def __init__(self, case: Case):
        self._case = case
        self._decode = FlashAttention3LatentDecode(case.stock_batch)

    def plan(self) -> None:
        """Nothing that a step would do on the host."""

    def run(self, layer: int) -> torch.Tensor:
        rows = self._case.paged(self._case.k[layer])
        return self._decode.run(self._case.q, (rows, rows[..., : self._case.heads.value_dim]))


class FlashInferLatent(_Latent):
    def __init__(self, case: Case):
        import flashinfer

        super().__init__(case)
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.int8, device=case.device)
        self._outs = [torch.empty_like(self.q) for _ in range(case.num_layers)]
        self._wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace, backend="auto")
        self.plan()

    def plan(self) -> None:
        case = self.case
        self._wrapper.plan(
            self.starts, self.starts * self.pages.shape[1], self.pages.view(-1), case.seq_lens,
            case.heads.num_qo_heads, self.dim, self.rope.shape[-1], case.page_size, False,
            case.sm_scale, case.dtype, case.dtype,
        )  # fmt: skip

    def run(self, layer: int) -> torch.Tensor:
        values, rope = (x[:, :, 0] for x in self.kv(layer))
        return self._wrapper.run(self.q, self.rope, values, rope, out=self._outs[layer])


class FlashMlaLatent(_Latent):
    """facts: the module that it was found in."""

    def __init__(self, case: Case):
        super().__init__(case)
        module = flash_mla()
        self._attend, self._schedule = module.flash_mla_with_kvcache, module.get_mla_metadata
        self.facts = {"module": module.__name__}
        self.plan()

    def plan(self) -> None:
        self._plan = self._schedule(self.case.seq_lens, self.case.heads.num_qo_heads, 1)

    def run(self, layer: int) -> torch.Tensor:
        case = self.case
        out, _ = self._attend(
            case.q[:, None], case.paged(case.k[layer]), self.pages, case.seq_lens, self.dim,
            *self._plan, softmax_scale=case.sm_scale, causal=True,
        )  # fmt: skip
        return out[:, 0]


def flash_mla() -> ModuleType:
    """Import FlashMLA. Raises ImportError, or whatever a broken build of it raises."""
    for name in _FLASH_MLA[:-1]:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return importlib.import_module(_FLASH_MLA[-1])


class FlashMla(Provider):
    def available(self) -> str | None:
        if not torch.cuda.is_available():
            return "needs an NVIDIA GPU"
        try:
            flash_mla()
        except Exception as error:  # a broken build fails with anything
            return f"cannot import any of {', '.join(_FLASH_MLA)}: {error}"
        return None

    def page_size(self, requested: int) -> int:
        return _FLASH_MLA_PAGE


PROVIDERS: dict[str, Callable[[], Provider]] = {
    "prefix": Server, "fa3": partial(FlashAttention3, runnable=FlashAttention3Latent),
    "flashinfer:mla": partial(Provider, "flashinfer:mla", "flashinfer", FlashInferLatent),
    "flashmla": partial(FlashMla, "flashmla", "", FlashMlaLatent),
}  # fmt: skip
