"""Counts how often the radix cache may have given running requests other nodes and slots.

Between two decode steps of the same requests nothing else does. So a step in which the count has
not changed need not look at every request, which costs more than all other bookkeeping.
"""

TARGET = "sglang.srt.mem_cache.radix_cache.RadixCache.cache_unfinished_req"
TYPE = "before"
PARAMETERS = ("self", "req")
WHY = "a plan is out of date when SGLang maps a running request to another one's slots"


def hook(tree_cache, *args, **kwargs):
    """Count before cache_unfinished_req, so also where it fails halfway."""
    tree_cache.prefix_attn_remaps = getattr(tree_cache, "prefix_attn_remaps", 0) + 1
