"""Counts, as remaps.py does, for UnifiedRadixCache until SGLang 0.5.21."""

from sgl_prefix_attn.patches.remaps import PARAMETERS, TYPE, WHY, hook

__all__ = ["PARAMETERS", "TARGET", "TYPE", "WHY", "hook"]

TARGET = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.cache_unfinished_req"
