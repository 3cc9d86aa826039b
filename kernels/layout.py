"""The int32 words of a plan: the one place where planner, torch executor and kernels agree.

A plan is one int32 array: a header, then sections at the offsets that the header names.

    SEGMENT  slots to copy into kv_indices once, when the plan is loaded
    TAIL     per request, in batch order: where its growing segment lies
    ENTRY    per query of a pack: which output row it is and where its partial results go
    ITEM     one work item: up to BLOCK_M / group_size queries over the KV they share, or several
             requests' tails; items of one tile stand together, heaviest first, and each is run
             once for every KV head
    MERGE    requests whose output is spread over several partial rows
"""

# Part of every calibration's key. Raise it by hand with a change after which measured times no
# longer hold: of a kernel, its tiles or its launch, of what PlanWork counts, of how a layer is
# timed; where times move by more than the few per cent that predictions err by. A release alone is
# no reason: whoever has measured a GPU would have to do it again.
KERNEL_REVISION = 1  # that of version 0.1.2

MAX_TILES = 8

# --- header -------------------------------------------------------------------------------------
H_VERSION = 0
H_BATCH = 1  # requests; rows at and above it are padding
H_SEGMENTS = 2  # word offset of the section
H_NUM_SEGMENTS = 3
H_TAILS = 4
H_ENTRIES = 5
H_MERGES = 6
H_NUM_MERGES = 7
H_QUEUES = 8  # + 2 * tile: word offset of the tile's items; + 2 * tile + 1: how many
HEADER_WORDS = H_QUEUES + 2 * MAX_TILES

VERSION = 1

# --- SEGMENT ------------------------------------------------------------------------------------
S_DST = 0  # first entry of kv_indices
S_ROW = 1  # request on whose row of req_to_token the slots stand
S_START = 2  # first KV position on that row
S_LEN = 3  # slots to copy
SEGMENT_WORDS = 4

# --- TAIL ---------------------------------------------------------------------------------------
T_DST = 0  # first entry of kv_indices of the request's tail segment
T_START = 1  # KV position of that entry; the tail is seq_lens[row] - T_START long
TAIL_WORDS = 2

# --- ENTRY --------------------------------------------------------------------------------------
E_ROW = 0  # request
E_PARTIAL = 1  # partial row of the pack's split 0 (split j: + j), or DIRECT
E_DST = 2  # tails: the request's T_DST, here again to save a kernel one dependent load
E_START = 3  # tails: its T_START
ENTRY_WORDS = 4
DIRECT = -1  # the request's only part: written to the output itself

# --- ITEM ---------------------------------------------------------------------------------------
# Items of a shared tile read one segment for I_NUM_QUERIES queries; items of a tails tile read the
# tails of I_NUM_QUERIES requests, each from its own TAIL segment and as long as it is by then.
I_SEGMENT = 0  # first entry of the segment in kv_indices (shared tiles)
I_LEN = 1  # KV tokens of the segment, or GROWS (tails tiles)
I_SPLIT = 2  # this item is split j ...
I_NUM_SPLITS = 3  # ... of n, see SPLIT_UNIT
I_ENTRY = 4  # first entry
I_NUM_QUERIES = 5
ITEM_WORDS = 8
GROWS = -1
# With u = ceil(len / SPLIT_UNIT), split j of n holds tokens [SPLIT_UNIT * (j * u // n),
# SPLIT_UNIT * ((j + 1) * u // n)) below len: never empty while n <= u, also as the tail grows.
SPLIT_UNIT = 16


def split_range(length: int, split: int, num_splits: int) -> tuple[int, int]:
    """Return the tokens [begin, end) of a segment that one split holds."""
    units = -(-length // SPLIT_UNIT)
    begin = SPLIT_UNIT * (split * units // num_splits)
    return begin, min(SPLIT_UNIT * ((split + 1) * units // num_splits), length)


# --- MERGE --------------------------------------------------------------------------------------
M_ROW = 0  # request
M_PARTIAL = 1  # first of its partial rows, which stand together
M_COUNT = 2  # how many (at least 2)
MERGE_WORDS = 4
