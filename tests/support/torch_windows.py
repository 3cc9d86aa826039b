"""SGLang's torch backend with what it lacks: windows over a pool of their own, and sinks. While the
probe's fault is `windows_narrowed`, decode steps see two tokens of a window.

Such a pool has two spaces of slots. SGLang's backend finds those of windows in its own one when it
writes, but reads them by the slots of full attention.
"""

import os
from pathlib import Path
from types import SimpleNamespace

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache import kv_cache_configurator
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

NAME = "triton"  # which SGLang lets models with sinks have


def install(names: list[str]) -> None:
    """Put it in the place of SGLang's backends of these names."""
    for name in names:
        ATTENTION_BACKENDS[name] = TorchWindows
    maker = kv_cache_configurator.KVCacheConfigurator
    if hasattr(maker, "_build_oot_mha_kv_pool"):
        for part in ("_build_token_to_kv_pool", "_build_token_to_kv_pool_allocator"):
            setattr(maker, part, _with_two_pools(getattr(maker, part)))


def _with_two_pools(build):
    """Until 0.5.18 SGLang gives platforms that it does not know one pool for all layers; build what
    it gives the others."""

    def built(self, **options):
        here = kv_cache_configurator.current_platform
        if self.is_hybrid_swa:
            kv_cache_configurator.current_platform = SimpleNamespace(is_out_of_tree=lambda: False)
        try:
            return build(self, **options)
        finally:
            kv_cache_configurator.current_platform = here

    return built


class TorchWindows(TorchNativeAttnBackend):
    def forward_decode(
        self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None, **options
    ):
        rows = [1] * len(forward_batch.seq_lens)
        window = layer.sliding_window_size
        if Path(os.environ["PROBE_FAULT"]).read_text().strip() == "windows_narrowed":
            window = min(window, 1)
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, sinks, rows, window)

    def forward_extend(
        self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None, **options
    ):
        rows, window = forward_batch.extend_seq_lens.tolist(), layer.sliding_window_size
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, sinks, rows, window)

    def _attend(self, q, k, v, layer, batch, save_kv_cache, sinks, rows, window):
        """Attend for the last rows[i] tokens of each request: q [tokens, Hq * D]."""
        pool, table = self.token_to_kv_pool, self.req_to_token_pool.req_to_token
        if save_kv_cache and k is not None:
            loc = KVWriteLoc(batch.out_cache_loc, self.swa_out_cache_loc)
            pool.set_kv_buffer(layer, loc, k, v)
        keys, values = (get(layer.layer_id) for get in (pool.get_key_buffer, pool.get_value_buffer))
        outs = []
        for query, row, length in zip(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim).split(rows),
            batch.req_pool_indices.tolist(),
            batch.seq_lens.tolist(),
            strict=True,
        ):
            slots = table[row, :length].long()
            if window > -1 and self.use_sliding_window_kv_pool:
                slots = pool.translate_loc_from_full_to_swa(slots)  # 0 where it has left the pool
            at = torch.arange(length - len(query), length)[:, None]
            behind = at - torch.arange(length)
            seen = (behind >= 0) & ((behind <= window) if window > -1 else True)
            outs.append(_softmax(query, keys[slots], values[slots], seen, layer.scaling, sinks))
        return torch.cat(outs).flatten(1)


def _softmax(q, k, v, seen, scaling, sinks):
    """q [rows, Hq, D], k and v [tokens, Hkv, D], seen [rows, tokens]; sinks [Hq] or None."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = torch.einsum("mhd,nhd->hmn", q, k) * scaling
    logits = logits.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        sinks = sinks.to(logits.dtype)[:, None, None].expand(-1, len(q), 1)
        logits = torch.cat([logits, sinks], 2)
    return torch.einsum("hmn,nhd->mhd", logits.softmax(2)[:, :, : len(k)], v)
