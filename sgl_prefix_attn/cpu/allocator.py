"""KV slot allocation on the CPU platform: SGLang 0.5.17's paged allocator without its kernels."""

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator


def make_allocator(size, page_size, dtype, device, kvcache, need_sort):
    """Make the allocator SGLang would for this page size, free of Triton kernels."""
    if page_size == 1:
        return TokenToKVPoolAllocator(size, dtype, device, kvcache, need_sort)
    return TorchPagedAllocator(size, page_size, dtype, device, kvcache, need_sort)


def num_pages(lens, page_size):
    """Return the pages that hold lens[i] tokens."""
    return (lens + page_size - 1) // page_size


def extend_slots(prefix_lens, seq_lens, last_loc, free_pages, page_size):
    """Return slots of the tokens prefix_lens[i] .. seq_lens[i], request after request.

    All tensors int64; last_loc[i] is the slot of token prefix_lens[i] - 1. Tokens first fill the
    request's last page, then pages from the front of `free_pages`, in request order.
    """
    pages_held = num_pages(prefix_lens, page_size)
    pages_added = num_pages(seq_lens, page_size) - pages_held
    first_page = torch.cumsum(pages_added, 0) - pages_added
    lens = seq_lens - prefix_lens
    row = torch.repeat_interleave(lens)
    offset = torch.arange(len(row)) - (torch.cumsum(lens, 0) - lens)[row]
    position = prefix_lens[row] + offset
    page = position // page_size - pages_held[row]  # -1: in the page already held
    slots = last_loc[row] + 1 + offset
    fresh = page >= 0
    pages = free_pages[(first_page[row] + page)[fresh]]
    slots[fresh] = pages * page_size + position[fresh] % page_size
    return slots


def decode_slots(seq_lens, last_loc, free_pages, page_size):
    """Return the slot of token seq_lens[i] - 1 (int64); a new page where the last is full."""
    opens_page = (seq_lens - 1) % page_size == 0
    slots = last_loc + 1
    slots[opens_page] = free_pages[: int(opens_page.sum())] * page_size
    return slots


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
        prefix, seq = prefix_lens_cpu.long(), seq_lens_cpu.long()
        added = int((num_pages(seq, self.page_size) - num_pages(prefix, self.page_size)).sum())
        if not self._reserve(added):
            return None
        slots = extend_slots(prefix, seq, last_loc.long(), self.free_pages, self.page_size)
        self.free_pages = self.free_pages[added:]
        return slots

    def alloc_decode(self, seq_lens, seq_lens_cpu, last_loc):
        seq = seq_lens_cpu.long()
        added = int((seq % self.page_size == 1).sum())
        if not self._reserve(added):
            return None
        slots = decode_slots(seq, last_loc.long(), self.free_pages, self.page_size)
        self.free_pages = self.free_pages[added:]
        return slots

    def _reserve(self, count: int) -> bool:
        """Tell whether the free list holds `count` pages, taking back released ones if needed."""
        if self.need_sort and count > len(self.free_pages):
            self.merge_and_sort_free()
        return count <= len(self.free_pages)
