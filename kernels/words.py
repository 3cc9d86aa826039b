"""The int32 words of a plan: the one place where planner, interpreter and kernels agree.

A plan is one int32 array: a header, ITEM words at a fixed place behind it, then the sections whose
offsets the header names. An item is a tile of up to tile_rows / group_size queries over a list of
BLOCK-token blocks of KV; it is run once for every KV head. How many rows a tile has depends on the
kernel that the plan is for: H_TILE_ROWS. Tile row r is query r // group_size of the tile, and head
r % group_size of the KV head's group. A query is a row of q and of the output;
the request that owns the KV is named by SEGMENT and GROWTH words alone.

    ITEM     one work item, heaviest first: a ticket's number is all that is needed to find it
    FLAGS    four bits a block, in the order in which the item reads its blocks
    ORDER    per tile: where its blocks lie (unmasked ones, then masked ones, then growth)
    SEGMENT  slots to copy into a tile's blocks once, when the plan is loaded
    GROWTH   per request, in batch order: which columns its appended tokens take
    MERGE    per query, only where some are in several tiles: which partial results are its own

Slots and keys are two arrays of BLOCK entries a block. Block b of item i lies at block
i * PRE + b while b < PRE, and at I_REST + b - PRE from there on: a CTA can read the slots of its
first blocks before it knows anything about the item. An entry without a token has slot -1.

A masked block's column is for some queries of the tile only; its key says for which. With up to 32
queries a tile the key has one bit a query, otherwise it is a range of tile rows. Neither cares
whether queries are requests or tokens of one request: a column that tokens 3 and later of a chain
see is the range from 3 on.

Growth: s steps after the plan was made (H_STEPS), an item has ceil(s * I_GROWING / BLOCK) more
blocks, all masked. The requests of a tile grow in several of its parts, so that these stay about
equally long. The token that a request appends in step s is in column (s - 1) * I_GROWING + G_INDEX
of its part's, so that a captured graph serves every step, and an append that runs twice writes the
same entries twice.

Aligned plans (H_PART_TOKENS, plan/aligned.py) grow otherwise, because a token's column follows from
its position. Step s is column s - 1 + G_INDEX of the blocks that G_ORDER begins a list of: the last
one that the request had, if that has columns left, and reserved ones. An item's reserved blocks
stand behind its others in the order in which they are begun, so that I_BLOCKS counts the first
ones: appending a token raises it to cover the token's block (the list of G_ITEMS names the ITEM of
each block).

Partial results. The parts of a split tile leave partial tiles, which are merged row by row. Where a
node is split off as a tile of its own, its queries are in other tiles, too, each among other
neighbours: their results are merged by query (H_MERGES). Such an item leaves every query's result
in a place of its own, and a query's places are merged, in the order in which MERGE names them, by
whoever leaves the last one. A place holds one query's heads, as a row of the output does; a partial
tile takes up as many places as its rows need. A query has one counter for each KV head, indexed by
its first place, which is no other query's.
"""

# Part of every calibration's key. Raise it by hand with a change after which measured times no
# longer hold: of a kernel, its tiles or its launch, of how a layer is timed; where times move by
# more than the few per cent that predictions err by. A release alone is no reason: whoever has
# measured a GPU would have to do it again. Nor is a kernel that is faster for some shapes alone:
# their old times only leave steps to stock attention, and docs/calibration.md names those shipped.
KERNEL_REVISION = 1  # that of version 0.1.2

BLOCK = 64  # KV tokens of a block
TILE_ROWS = 128  # rows of a tile of the Gluon kernel: two warpgroups of 64
HALF_ROWS = 64  # a tile of up to so many rows has no halves: one warpgroup runs it
PRE = 3  # blocks of an item whose place follows from the item's number
LOOKAHEAD = 6  # most blocks that a CTA asks for slots ahead, also behind the last item's end
NONE = -1  # no token, no request

# --- header -------------------------------------------------------------------------------------
H_BATCH = 0  # requests; rows at and above it are padding
H_STEPS = 1  # tokens that every request has grown since the plan; 0 when loaded, set by append
H_NUM_ITEMS = 2
H_HEADROOM = 3  # largest H_STEPS that the growth columns have room for
H_ORDER = 4  # word offset of the section
H_SEGMENTS = 5
H_NUM_SEGMENTS = 6
H_GROWTHS = 7
H_TILE_ROWS = 8  # rows that a tile has room for
H_MERGES = 9  # word offset of the section, 0 where each query is in one tile
H_PART_TOKENS = 10  # of an aligned plan, else 0
HEADER_WORDS = 16

# --- ITEM (item i at HEADER_WORDS + i * item_words(group_size, tile_rows)) -----------------------
I_BLOCKS = 0  # blocks that the plan gives it
I_ROWS = 1  # rows that are in use: queries * group_size
I_GROWING = 2  # requests of the tile that grow in this part of it
I_REST = 3  # block number of its block PRE
I_FLAGS = 4  # word offset of its FLAGS
I_PART = 5  # this item is part j ...
I_PARTS = 6  # ... of n of its tile; 1: results go to the output itself, BY_QUERY: to places
I_PARTIAL = 7  # partial tile of the tile's part 0 (part j: + j); BY_QUERY: place of query 0
I_COUNTER = 8  # the tile's counters are 2 a KV head from here, 0 between launches
I_QUERIES = 12  # rows of q and of the output, one a query of the tile

BY_QUERY = 0  # I_PARTS of items whose results are merged by query


def portable_tile_rows(group_size: int) -> int:
    """Count the rows of the portable kernel's tiles: 64, or 128 where a group has more heads."""
    return 64 if group_size <= 64 else 128


def queries_per_tile(group_size: int, tile_rows: int) -> int:
    """Count the queries whose heads of one KV head fit a tile."""
    return tile_rows // group_size


def item_words(group_size: int, tile_rows: int) -> int:
    """Count the words of one ITEM, a multiple of 16 bytes."""
    return I_QUERIES + -(-queries_per_tile(group_size, tile_rows) // 4) * 4


# --- FLAGS --------------------------------------------------------------------------------------
# Block b's four bits are bits 4 * (b % 8) and up of word I_FLAGS + b // 8. The first block of an
# item is for both warpgroups, and neither has to pass on two blocks in turn. Up to head dim 128 it
# holds a block's values until its next own block: that one, those passed on in between and the one
# held need a stage each, or the ring cannot move on. With one in between any ring of three stages
# will do. (Head dim 256 has two stages, and holds no values beyond their own block.)
FLAG_BITS = 4
FLAGS_PER_WORD = 8
MASKED = 1
FOR_WARPGROUP = 2  # << warpgroup: the block has columns for its rows
FOR_BOTH = 6
GROWTH_FLAGS = MASKED | FOR_BOTH

# --- SEGMENT ------------------------------------------------------------------------------------
# Token t of a segment is column c = S_COLUMN + t of the block list that starts at ORDER word
# S_ORDER: entry ORDER[S_ORDER + c // BLOCK] * BLOCK + c % BLOCK.
S_ORDER = 0
S_COLUMN = 1
S_REQUEST = 2  # request on whose row of req_to_token the slots stand, NONE for empty columns
S_START = 3  # first KV position on that row
S_LEN = 4
S_KEY = 5
SEGMENT_WORDS = 6

# --- GROWTH -------------------------------------------------------------------------------------
G_ORDER = 0  # ORDER word of the first growth block of its part
G_INDEX = 1  # which of the requests that grow in that part it is ...
G_GROWING = 2  # ... of how many (I_GROWING)
G_KEY = 3  # key of its columns
G_LEN = 4  # its KV tokens when the plan was made: its step is seq_len - G_LEN
G_ITEMS = 5  # of an aligned plan: word offset of the list that says which items its blocks are of
GROWTH_WORDS = 6

# --- MERGE (of row r of q at H_MERGES + r * MERGE_WORDS) ------------------------------------------
M_PLACES = 0  # word offset of its places, in the order in which they are merged
M_COUNT = 1  # how many; 0: its tile is the only one that it is in
MERGE_WORDS = 2


def has_bit_keys(group_size: int, tile_rows: int) -> bool:
    """Tell whether a key is one bit a query (True) or first row | end row << 16 (False)."""
    return queries_per_tile(group_size, tile_rows) <= 32


def make_key(first: int, end: int, group_size: int, tile_rows: int) -> int:
    """Make the key of columns for queries [first, end) of a tile, as an int32."""
    if tile_rows // group_size <= 32:  # has_bit_keys; the planner compiles this function by itself
        key = (1 << end) - (1 << first)
    else:
        key = first * group_size | end * group_size << 16
    return key - (1 << 32) if key >> 31 else key
