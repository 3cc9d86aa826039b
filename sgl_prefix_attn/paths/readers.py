"""Chooses the reader of a prefix cache, by what the cache has and never by SGLang's version."""

from sgl_prefix_attn.paths.radix_reader import RadixReader
from sgl_prefix_attn.paths.tree_reader import TreeReader
from sgl_prefix_attn.paths.unified_node_reader import UnifiedNodeReader
from sgl_prefix_attn.paths.unified_path_reader import UnifiedPathReader

# By module and name of the exact class: a subclass like LMCRadixCache keeps values elsewhere, so it
# is not supported until it has been tried.
_READERS: dict[tuple[str, str], TreeReader] = {
    ("sglang.srt.mem_cache.radix_cache", "RadixCache"): RadixReader(),
    # HiCache until 0.5.18, later part of UnifiedRadixCache. It never moves the KV of a running
    # request, whose path is locked: docs/sglang-integration.md says what is known of that.
    ("sglang.srt.mem_cache.hiradix_cache", "HiRadixCache"): RadixReader(),
    # The radix cache is off: its requests have no node, and nothing counts remaps.
    ("sglang.srt.mem_cache.chunk_cache", "ChunkCache"): RadixReader(),
}
# Around one of these two until 0.5.21; UnifiedRadixCache has sessions of its own.
_SESSIONS = ("sglang.srt.session.streaming_session", "StreamingSession")
_UNIFIED = ("sglang.srt.mem_cache.unified_radix_cache", "UnifiedRadixCache")
# SGLang's ComponentType: what a node keeps beside the slots of full attention (0), which mean the
# same in each of these trees. Slots of windows (1) and states of linear attention (2) only say
# where a match may end.
_FULL_ALONE = {0}
_COMPONENTS = (_FULL_ALONE, {0, 1}, {0, 2})
_BY_PATH, _BY_NODE = UnifiedPathReader(), UnifiedNodeReader()


def reader_of(tree_cache) -> TreeReader | None:
    """Return the reader of a cache, None where its paths cannot be read."""
    return _reader_or_problem(tree_cache)[0]


def unsupported_tree(tree_cache) -> str | None:
    """Say why the paths of this cache cannot be read, or None."""
    reader, problem = _reader_or_problem(tree_cache)
    return None if reader else f"tree:{problem}"


def _reader_or_problem(cache) -> tuple[TreeReader | None, str]:
    name = type(cache).__module__, type(cache).__name__
    if name == _SESSIONS:
        return _reader_or_problem(cache.inner)
    if name != _UNIFIED:
        return _READERS.get(name), name[1]
    if set(cache.tree_components) not in _COMPONENTS:
        return None, "components"
    if _FULL_ALONE != set(cache.tree_components) and cache.cache_controller is not None:
        return None, "hicache_components"  # not tried
    # HiCache whose host memory is no cache, only the way to and from a store: not tried.
    if getattr(cache, "buffer_pipeline", None) is not None:
        return None, "hicache_buffer_only"
    if getattr(cache, "linker", None) is not None:
        return None, "linker"
    core = type(cache.tree_core).__name__
    if core == "UnifiedTreeCore":  # in Python: its nodes are read in half the time
        return _BY_NODE, core
    return _BY_PATH if hasattr(cache.tree_core, "collect_path_info") else None, core
