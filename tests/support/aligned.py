"""Where an aligned plan has each row's KV, read back from its words and blocks."""

from __future__ import annotations

import torch

from sgl_prefix_attn.execute import interpreter as oracle
from sgl_prefix_attn.kernels import words as W


def read_by(words: torch.Tensor, blocks: oracle.Blocks, group: int) -> dict[int, list[tuple]]:
    """For each row of q: (part, block, column, slot) of all KV that it sees, in the order in which
    it is added; block counts those of the part in which it sees anything."""
    tile_rows = int(words[W.H_TILE_ROWS])
    size = W.item_words(group, tile_rows)
    found: dict[int, dict[int, list]] = {}
    for i in range(int(words[W.H_NUM_ITEMS])):
        item = words[W.HEADER_WORDS + i * size :][:size].tolist()
        rows = torch.arange(item[W.I_ROWS])[::group]  # one head of each query
        for query in item[W.I_QUERIES :][: len(rows)]:
            parts = found.setdefault(query, {})
            assert item[W.I_PART] not in parts and item[W.I_PART] < item[W.I_PARTS]
            parts[item[W.I_PART]] = []
        for b in range(item[W.I_BLOCKS]):
            word = int(words[item[W.I_FLAGS] + b // W.FLAGS_PER_WORD])
            flags = word >> (b % W.FLAGS_PER_WORD * W.FLAG_BITS)
            at = (i * W.PRE + b if b < W.PRE else item[W.I_REST] + b - W.PRE) * W.BLOCK
            slots = blocks.slots[at : at + W.BLOCK]
            seen = oracle.sees(blocks.keys[at : at + W.BLOCK], rows, group, tile_rows)
            seen &= slots >= 0
            if not flags & W.MASKED:
                seen[:] = True
            for place, query in enumerate(item[W.I_QUERIES :][: len(rows)]):
                if item[W.I_ROWS] > W.HALF_ROWS:
                    first = place * group >= W.HALF_ROWS
                    second = (place + 1) * group > W.HALF_ROWS
                    mine = {first, second}  # halves that the query's heads are in
                else:
                    mine = {False}
                if seen[place].any():
                    for half in mine:
                        assert flags & W.FOR_WARPGROUP << half, "a block is not for its rows"
                    columns = seen[place].nonzero().flatten().tolist()
                    of_part = found[query][item[W.I_PART]]
                    block = of_part[-1][0] + 1 if of_part else 0
                    of_part.extend((block, c, int(slots[c])) for c in columns)
    return {
        query: [(part, *entry) for part in sorted(parts) for entry in parts[part]]
        for query, parts in found.items()
    }


def expected(slots: list[int], part_tokens: int) -> list[tuple]:
    """Where the KV of a row that sees these slots must be."""
    if len(slots) < 1.5 * part_tokens:
        part_tokens = len(slots)
    return [
        (p // part_tokens, p % part_tokens // W.BLOCK, p % W.BLOCK, slot)
        for p, slot in enumerate(slots)
    ]
