"""Counts, as remaps.py does, for UnifiedRadixCache from SGLang 0.5.22 on."""

from sgl_prefix_attn.patches.remaps import PARAMETERS, TYPE, WHY, hook

__all__ = ["PARAMETERS", "TARGET", "TYPE", "WHY", "hook"]

TARGET = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.checkpoint"
