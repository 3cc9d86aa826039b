"""KV slot allocation on the CPU platform: SGLang's paged allocator without its kernels."""

import torch
from sglang.srt.mem_cache.allocator import (
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
    alloc_extend_naive,
)
from sglang.srt.utils import get_num_new_pages


def make_allocator(size, page_size, dtype, device, kvcache, need_sort):
    """Make the allocator SGLang would for this page size, free of Triton kernels."""
    if page_size == 1:
        return TokenToKVPoolAllocator(size, dtype, device, kvcache, need_sort)
    return TorchPagedAllocator(size, page_size, dtype, device, kvcache, need_sort)


class TorchPagedAllocator(PagedTokenToKVPoolAllocator):
    """Same free list and same slots as its base, which computes them in two Triton kernels."""

    free_pages: torch.Tensor

    def alloc_extend(
        self,
        prefix_lens,
        prefix_lens_cpu,
        seq_lens,
        seq_lens_cpu,
        last_loc,
        extend_num_tokens,
        num_new_pages=None,
    ):
        """Return slots of the tokens prefix_lens[i] .. seq_lens[i], request after request, or None.

        last_loc[i] is the slot of token prefix_lens[i] - 1. Tokens first fill the request's last
        page, then pages from the front of the free list, in request order.
        """
        prefix, seq = prefix_lens_cpu.long(), seq_lens_cpu.long()
        count = get_num_new_pages(seq_lens=seq, page_size=self.page_size, prefix_lens=prefix)
        if self.need_sort and count > len(self.free_pages):
            self.merge_and_sort_free()
        if count > len(self.free_pages):
            return None
        pages, self.free_pages = self.free_pages[:count], self.free_pages[count:]
        slots = torch.empty(extend_num_tokens, dtype=torch.int64)
        last = last_loc.long()
        alloc_extend_naive(prefix, seq, last, pages, slots, self.page_size, self.device)
        return slots

    def alloc_decode(self, seq_lens, seq_lens_cpu, last_loc):
        """Return the slot of token seq_lens[i] - 1, or None; last_loc[i] is the one before."""
        before, batch = seq_lens_cpu - 1, len(seq_lens_cpu)
        return self.alloc_extend(None, before, seq_lens, seq_lens_cpu, last_loc, batch)
