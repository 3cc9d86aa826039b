"""Attention of one step of a round of draft steps: over the round's plan, or stock.

Step i attends to the committed KV of a request, L tokens, and to the i + 1 tokens that the round
has drafted so far, its own included: what SGLang's draft backends read from req_to_token. SGLang
leaves the batch's seq_lens at L for all of the round.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sgl_prefix_attn.engine.cross_check import check_layer
from sgl_prefix_attn.engine.planned_layer import attend, option_of, write_kv

if TYPE_CHECKING:
    from sgl_prefix_attn.engine.planned_drafts import PlannedDrafts


class DraftStep:
    """One step of a round; what is not here is its stock backend's."""

    def __init__(self, drafts: PlannedDrafts, i_step: int, stock):
        self._stock = stock
        self._drafts, self._i_step = drafts, i_step
        self._seq_lens: Any = None  # int [>= B], the step's own; None before its first layer

    def __getattr__(self, name: str):
        return getattr(self._stock, name)

    def begin(self) -> None:
        """A round begins, in a graph or without."""
        self._seq_lens = None

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        """Attend in one layer: q [B, Hq * D], k and v [B, Hkv, D]; returns [B, Hq * D]."""
        drafts, stock = self._drafts, self._stock
        if drafts.is_active and (option := option_of(kwargs)):
            drafts.leave(f"layer_option:{option}", self._i_step, forward_batch)
        if not drafts.is_active:
            return stock.forward(
                q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs
            )
        write_kv(drafts.token_to_kv_pool, k, v, layer, forward_batch, save_kv_cache)
        rows = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = drafts.output(rows)
        try:
            if self._seq_lens is None:
                self._append(forward_batch)
            attend(drafts.executor, drafts.token_to_kv_pool, rows, layer, self._seq_lens, out)
        except Exception as error:
            drafts.fail(error, self._i_step, forward_batch)
            return stock.forward(q, k, v, layer, forward_batch, save_kv_cache=False)
        out = out.view(-1, layer.tp_q_head_num * layer.v_head_dim)
        if drafts.cross_checks:
            expected = stock.forward(q, k, v, layer, forward_batch, save_kv_cache=False)
            check_layer(layer.layer_id, out, expected, drafts.counters)
        return out

    def _append(self, forward_batch) -> None:
        """Let the plan grow by the step's tokens; those of the first step are in it."""
        self._seq_lens = forward_batch.seq_lens + (self._i_step + 1)
        # A step's slots are a column of the round's, [B, S]; kernels read them one after another.
        slots = forward_batch.out_cache_loc.contiguous()
        self._drafts.executor.append(self._seq_lens, slots)
