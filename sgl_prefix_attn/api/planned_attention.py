"""What the library's wrappers share: the layers they are for, and a loaded plan run over one."""

import torch

from sgl_prefix_attn.api import argument_checks as checks
from sgl_prefix_attn.execute.executor import PlanExecutor
from sgl_prefix_attn.execute.lse import Lse
from sgl_prefix_attn.execute.params import LayerParams
from sgl_prefix_attn.records import HeadConfig


class PlannedAttention:
    """Base of the wrappers. `_executor`, `_seq_lens` and `_max_slot` are those of the plan."""

    _executor: PlanExecutor
    _seq_lens: torch.Tensor
    _max_slot: int

    def __init__(
        self,
        heads: HeadConfig,
        page_size: int,
        device: torch.device | str,
        dtype: torch.dtype,
        sm_scale: float | None,
        logits_soft_cap: float,
    ):
        """Raises ValueError naming the argument, as PrefixDecodeWrapper says."""
        self.heads = heads
        self.device = torch.device(device)
        checks.wrapper_arguments(heads.head_dim, page_size, self.device, dtype, logits_soft_cap)
        self.page_size = page_size
        self.dtype = dtype
        self.sm_scale = heads.head_dim**-0.5 if sm_scale is None else float(sm_scale)
        self.logits_soft_cap = float(logits_soft_cap)

    def _run_layer(
        self,
        q: torch.Tensor,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor | None,
        return_lse: bool,
        rows: int,
    ) -> torch.Tensor | tuple[torch.Tensor, Lse]:
        """Attend in one layer over the loaded plan, which asks for so many rows of q."""
        k_cache, v_cache = checks.run_tensors(
            q, kv_cache, out, self.heads, self.dtype, self.device, rows, self._max_slot
        )
        if out is None:
            out = torch.empty_like(q)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None
        self._executor.run(
            LayerParams(
                q=q,
                k_cache=k_cache,
                v_cache=v_cache,
                seq_lens=self._seq_lens,
                out=out,
                out_lse=lse,
                sm_scale=self.sm_scale,
                soft_cap=self.logits_soft_cap,
            )
        )
        return out if lse is None else (out, Lse(lse))
