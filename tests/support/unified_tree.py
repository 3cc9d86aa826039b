"""SGLang's own UnifiedRadixCache, filled without an engine: prompts of four levels."""

from __future__ import annotations

import array
import os
from types import SimpleNamespace

import torch

from sgl_prefix_attn.engine.start_checks import TREE_CORE

CORES = ("python", "rust")
_GROUPS = 8


def make_cache(core: str, **changes):
    """Make SGLang's tree with one of its cores, over a pool that is never read; `changes` of its
    parameters.

    Raises ValueError for a core that it does not have.
    """
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    from sglang.srt.runtime_context import get_context

    get_context().override_server_args().install()
    os.environ[TREE_CORE] = core
    allocator = SimpleNamespace(device="cpu", page_size=1, free=_nothing, free_segment=_nothing)
    return UnifiedRadixCache(
        CacheInitParams(
            disable=False,
            req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(4, 8, dtype=torch.int32)),
            token_to_kv_pool_allocator=allocator,
            page_size=1,
            tree_components=(ComponentType.FULL,),
            **changes,
        )
    )


def prompts(batch: int) -> list[list[int]]:
    """One prompt for all, one of eight groups, one of two requests, one request's own."""
    return [
        [7] * 512 + [100 + i // 2 % _GROUPS] * 64 + [1000 + i // 2] * 32 + [100_000 + i] * 40
        for i in range(batch)
    ]


def fill(cache, batch: int) -> list:
    """Insert the prompts and return requests that end at their leaves."""
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    cache.reset()
    keys = [RadixKey(array.array("q", ids)) for ids in prompts(batch)]
    for i, key in enumerate(keys):
        start = i * len(key)
        cache.insert(InsertParams(key=key, value=torch.arange(start, start + len(key))))
    ends = [cache.match_prefix(MatchPrefixParams(key=key)).last_device_node for key in keys]
    return [SimpleNamespace(last_node=end, rid=str(i)) for i, end in enumerate(ends)]


def _nothing(*args, **kwargs) -> None:
    pass
