"""Reads SGLang's ChunkCache: the radix cache is off, so no request has a path."""

from sgl_prefix_attn.paths.radix_reader import RadixReader


class ChunkReader(RadixReader):
    """TreeReader of sglang.srt.mem_cache.chunk_cache.ChunkCache, whose requests have no node."""

    def remaps(self, tree_cache) -> None:
        return None
