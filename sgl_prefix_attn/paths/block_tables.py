"""Finds shared prefixes in a block table, for callers without a radix tree."""

import numpy as np
import torch

from sgl_prefix_attn.records import PathTable


def shared_paths(pages: np.ndarray, seq_lens: np.ndarray, page_size: int) -> PathTable:
    """Find prefix paths of a block table [B, pages]; equal leading pages are shared.

    Rows are grouped by the page where they stand, the group's common run of pages becomes a node,
    and what follows is grouped again. A row's last page is never part of a node: it is written to.
    O(B * pages) for each level of the forest.
    """
    batch = seq_lens.size
    full = (seq_lens - 1) // page_size  # pages that may be shared
    parent, length = [], []
    leaf = np.full(batch, -1, np.int32)
    groups = [(np.arange(batch), 0, -1)]  # rows, page where they stand, node above
    while groups:
        rows, page, above = groups.pop()
        rows = rows[full[rows] > page]
        if rows.size < 2:
            continue
        _, member = np.unique(pages[rows, page], return_inverse=True)
        for i in range(member.max() + 1):
            same = rows[member == i]
            if same.size < 2:
                continue
            stop = int(full[same].min())
            differs = (pages[same, page:stop] != pages[same[0], page:stop]).any(axis=0)
            run = int(differs.argmax()) if differs.any() else stop - page
            parent.append(above)
            length.append(run * page_size)
            leaf[same] = len(parent) - 1
            groups.append((same, page + run, len(parent) - 1))
    return PathTable.of(parent, length, leaf, seq_lens)


def token_slots(block_table: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return the KV slot of every token: pages [B, P] -> slots [B, P * page_size]."""
    if page_size == 1:
        return block_table
    within = torch.arange(page_size, device=block_table.device)
    # a page number that makes no sense must not wrap into one that does
    pages = block_table.long().clamp(-1, 1 << 31)
    return (pages[..., None] * page_size + within).flatten(1)
