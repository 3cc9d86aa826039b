"""Chooses the reader of a prefix cache, by what the cache has and never by SGLang's version."""

from __future__ import annotations

from typing import Any

from sgl_prefix_attn.paths.chunk_reader import ChunkReader
from sgl_prefix_attn.paths.radix_reader import RadixReader
from sgl_prefix_attn.paths.tree_reader import TreeReader
from sgl_prefix_attn.paths.unified_node_reader import UnifiedNodeReader
from sgl_prefix_attn.paths.unified_path_reader import UnifiedPathReader

# By module and name of the exact class: HiRadixCache and LMCRadixCache derive from RadixCache and
# keep values elsewhere, so a subclass is not supported until it has been tried.
_READERS: dict[tuple[str, str], TreeReader] = {
    ("sglang.srt.mem_cache.radix_cache", "RadixCache"): RadixReader(),
    ("sglang.srt.mem_cache.chunk_cache", "ChunkCache"): ChunkReader(),
}
# Around one of these two until 0.5.21; UnifiedRadixCache has sessions of its own.
_SESSIONS = ("sglang.srt.session.streaming_session", "StreamingSession")
_UNIFIED = ("sglang.srt.mem_cache.unified_radix_cache", "UnifiedRadixCache")
_BY_PATH, _BY_NODE = UnifiedPathReader(), UnifiedNodeReader()


def reader_of(tree_cache) -> TreeReader | None:
    """Return the reader of a cache, None where its paths cannot be read."""
    name, tree_cache = _inner(tree_cache)
    if name == _UNIFIED:
        return None if _unified_problem(tree_cache) else _unified_reader(tree_cache)
    return _READERS.get(name)


def unsupported_tree(tree_cache) -> str | None:
    """Say why the paths of this cache cannot be read, or None."""
    name, tree_cache = _inner(tree_cache)
    if name == _UNIFIED:
        return _unified_problem(tree_cache)
    return None if name in _READERS else f"tree:{name[1]}"


def _inner(tree_cache) -> tuple[tuple[str, str], Any]:
    """Module and name of the class that keeps the tree, and the cache itself."""
    name = type(tree_cache).__module__, type(tree_cache).__name__
    return _inner(tree_cache.inner) if name == _SESSIONS else (name, tree_cache)


def _unified_problem(tree_cache) -> str | None:
    # Sliding windows and state-space models keep slots of their own in the tree.
    if tree_cache.tree_components != (0,):  # full attention alone
        return "tree:components"
    if tree_cache.cache_controller is not None:
        return "tree:hicache"
    if getattr(tree_cache, "linker", None) is not None:
        return "tree:linker"
    core = type(tree_cache.tree_core).__name__
    return None if _unified_reader(tree_cache) else f"tree:{core}"


def _unified_reader(tree_cache) -> TreeReader | None:
    core = tree_cache.tree_core
    if type(core).__name__ == "UnifiedTreeCore":  # in Python: its nodes are read in half the time
        return _BY_NODE
    return _BY_PATH if hasattr(core, "collect_path_info") else None
