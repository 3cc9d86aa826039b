"""Chooses the reader of a prefix cache."""

from __future__ import annotations

from sgl_prefix_attn.paths.chunk_reader import ChunkReader
from sgl_prefix_attn.paths.radix_reader import RadixReader
from sgl_prefix_attn.paths.tree_reader import TreeReader

# By module and name of the exact class: HiRadixCache and LMCRadixCache derive from RadixCache and
# keep values elsewhere, so a subclass is not supported until it has been tried.
_READERS: dict[tuple[str, str], TreeReader] = {
    ("sglang.srt.mem_cache.radix_cache", "RadixCache"): RadixReader(),
    ("sglang.srt.mem_cache.chunk_cache", "ChunkCache"): ChunkReader(),
}


def reader_of(tree_cache) -> TreeReader | None:
    """Return the reader of a cache, None where its paths cannot be read."""
    kind = type(tree_cache)
    return _READERS.get((kind.__module__, kind.__name__))


def unsupported_tree(tree_cache) -> str | None:
    """Say why the paths of this cache cannot be read, or None."""
    return None if reader_of(tree_cache) else f"tree:{type(tree_cache).__name__}"
