"""A plan's words, read a second time by layout.py's text alone, and the proof that a plan computes
full attention: nothing here is shared with the executors."""

import math
from dataclasses import dataclass

import numpy as np

from sgl_prefix_attn.kernels import layout as L
from sgl_prefix_attn.records import PathTable, Plan
from tests.support.forests import owners


@dataclass(frozen=True)
class Part:
    """One query of one work item: request `row` attends to entries [begin, end) of kv_indices and
    writes partial row `slot`, or the output itself where slot is None."""

    row: int
    slot: int | None
    begin: int
    end: int
    tile: int
    item: int


def decode_parts(words: np.ndarray, seq_lens) -> list[Part]:
    words = np.asarray(words).tolist()
    parts = []
    for tile in range(L.MAX_TILES):
        queue, count = words[L.H_QUEUES + 2 * tile], words[L.H_QUEUES + 2 * tile + 1]
        for n in range(count):
            item = queue + n * L.ITEM_WORDS
            split, splits = words[item + L.I_SPLIT], words[item + L.I_NUM_SPLITS]
            assert 0 <= split < splits
            for i in range(words[item + L.I_NUM_QUERIES]):
                entry = words[L.H_ENTRIES] + (words[item + L.I_ENTRY] + i) * L.ENTRY_WORDS
                row, slot = words[entry + L.E_ROW], words[entry + L.E_PARTIAL]
                segment, length = words[item + L.I_SEGMENT], words[item + L.I_LEN]
                if length == L.GROWS:
                    tail = words[L.H_TAILS] + row * L.TAIL_WORDS
                    segment = words[tail + L.T_DST]
                    length = int(seq_lens[row]) - words[tail + L.T_START]
                units = math.ceil(length / 16)
                begin = math.floor(split * units / splits) * 16
                end = min(length, math.floor((split + 1) * units / splits) * 16)
                parts.append(
                    Part(
                        row, None if slot == -1 else slot + split, segment + begin, segment + end,
                        tile, item,
                    )
                )  # fmt: skip
    return parts


def items(plan):
    """(tile, [items, words]) of every tile, in the order of its queue."""
    for tile in range(L.MAX_TILES):
        first, count = plan.words[L.H_QUEUES + 2 * tile :][:2]
        yield tile, plan.words[first : first + count * L.ITEM_WORDS].reshape(count, L.ITEM_WORDS)


def segments(words: np.ndarray) -> np.ndarray:
    """[segments, (dst, row, start, len)]"""
    first, count = words[L.H_SEGMENTS], words[L.H_NUM_SEGMENTS]
    return words[first : first + count * L.SEGMENT_WORDS].reshape(count, L.SEGMENT_WORDS)


def merge_entries(words: np.ndarray) -> np.ndarray:
    """[merges, (row, slot, count, 0)]"""
    first, count = words[L.H_MERGES], words[L.H_NUM_MERGES]
    return words[first : first + count * L.MERGE_WORDS].reshape(count, L.MERGE_WORDS)


def filled_positions(plan: Plan, paths: PathTable, grown: int) -> list[tuple[int, int] | None]:
    """(owner, position) that every entry of kv_indices holds after load and `grown` appends."""
    entries: list[tuple[int, int] | None] = [None] * plan.num_index_slots

    def write(where, owner, position):
        assert entries[where] is None, f"entry {where} is written twice"
        entries[where] = (int(owner), int(position))

    for dst, row, start, length in segments(plan.words).tolist():
        owner = owners(paths, row)
        for i in range(length):
            write(dst + i, owner[start + i], start + i)
    for row, seq_len in enumerate(plan.seq_lens.tolist()):
        tail = plan.words[plan.words[L.H_TAILS] + row * L.TAIL_WORDS :]
        for position in range(seq_len, seq_len + grown):
            write(int(tail[L.T_DST] + position - tail[L.T_START]), ~row, position)
    return entries


def check_coverage(plan: Plan, paths: PathTable, grown: int = 0) -> None:
    """Every KV position of every request is read by exactly one of its parts, no part is empty,
    and each partial row is written once and merged once."""
    entries = filled_positions(plan, paths, grown)
    parts = decode_parts(plan.words, plan.seq_lens + grown)
    read: list[list] = [[] for _ in range(plan.batch_size)]
    written: dict[int, int] = {}
    direct = set()
    for part in parts:
        assert part.begin < part.end, f"empty {part}"
        read[part.row] += entries[part.begin : part.end]
        if part.slot is None:
            assert part.row not in direct, f"request {part.row} writes its output twice"
            direct.add(part.row)
        else:
            assert part.slot not in written, f"partial row {part.slot} is written twice"
            written[part.slot] = part.row
    for row, got in enumerate(read):
        own = list(owners(paths, row)) + [~row] * grown
        want = [(int(owner), position) for position, owner in enumerate(own)]
        assert None not in got, f"request {row} reads an entry that nothing wrote"
        assert sorted(got, key=lambda e: e[1]) == want, f"request {row} misses or repeats KV"
    merged: dict[int, int] = {}
    for row, slot, count, _ in merge_entries(plan.words).tolist():
        assert count >= 2 and row not in direct
        for i in range(slot, slot + count):
            assert i not in merged, f"partial row {i} is merged twice"
            merged[i] = row
    assert merged == written, "partial rows merged are not the partial rows written"
    assert set(written) == set(range(plan.num_partials))
    assert direct | set(merged.values()) == set(range(plan.batch_size))
