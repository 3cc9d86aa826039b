"""The int32 words of a row-tile plan: the one place where planner, interpreter and kernels agree.

A plan is one int32 array: a header, ITEM words at a fixed place behind it, then the sections whose
offsets the header names. An item is a tile of up to TILE_ROWS / group_size queries over a list of
BLOCK-token blocks of KV; it is run once for every KV head. Tile row r is query r // group_size of
the tile, and head r % group_size of the KV head's group. A query is a row of q and of the output;
the request that owns the KV is named by SEGMENT and GROWTH words alone.

    ITEM     one work item, heaviest first: a ticket's number is all that is needed to find it
    FLAGS    four bits a block, in the order in which the item reads its blocks
    ORDER    per tile: where its blocks lie (unmasked ones, then masked ones, then growth)
    SEGMENT  slots to copy into a tile's blocks once, when the plan is loaded
    GROWTH   per request, in batch order: which columns its appended tokens take

Slots and keys are two arrays of BLOCK entries a block. Block b of item i lies at block
i * PRE + b while b < PRE, and at I_REST + b - PRE from there on: a CTA can read the slots of its
first blocks before it knows anything about the item. An entry without a token has slot -1.

A masked block's column is for some queries of the tile only; its key says for which. With up to 32
queries a tile the key has one bit a query, otherwise it is a range of tile rows. Neither cares
whether queries are requests or tokens of one request: a column that tokens 3 and later of a chain
see is the range from 3 on.

Growth: s steps after the plan was made (H_STEPS), the item that ends a tile has
ceil(s * I_GROWING / BLOCK) more blocks, all masked. The token that a request of the tile appends in
step s is in column (s - 1) * I_GROWING + G_INDEX of them, so that a captured graph serves every
step, and an append that runs twice writes the same entries twice.
"""

BLOCK = 64  # KV tokens of a block
TILE_ROWS = 128  # rows of a tile: two warpgroups of 64
HALF_ROWS = 64  # a tile of up to so many rows is run by one warpgroup
PRE = 3  # blocks of an item whose place follows from the item's number
NONE = -1  # no token, no request

# --- header -------------------------------------------------------------------------------------
H_VERSION = 0
H_BATCH = 1  # requests; rows at and above it are padding
H_STEPS = 2  # tokens that every request has grown since the plan; 0 when loaded, set by append
H_NUM_ITEMS = 3
H_HEADROOM = 4  # largest H_STEPS that the growth columns have room for
H_ORDER = 5  # word offset of the section
H_SEGMENTS = 6
H_NUM_SEGMENTS = 7
H_GROWTHS = 8
HEADER_WORDS = 16

# Unlike any version of layout.py, so that words never reach the kernels of the other layout.
VERSION = 1001

# --- ITEM (item i at HEADER_WORDS + i * item_words(group_size)) ----------------------------------
I_BLOCKS = 0  # blocks that the plan gives it
I_ROWS = 1  # rows that are in use: queries * group_size
I_GROWING = 2  # requests of the tile that grow here, 0 for all but the last part of a tile
I_REST = 3  # block number of its block PRE
I_FLAGS = 4  # word offset of its FLAGS
I_PART = 5  # this item is part j ...
I_PARTS = 6  # ... of n of its tile; 1: results go to the output itself
I_PARTIAL = 7  # partial tile of the tile's part 0 (part j: + j)
I_COUNTER = 8  # the tile's counters are 2 a KV head from here, 0 between launches
I_QUERIES = 12  # rows of q and of the output, one a query of the tile


def queries_per_tile(group_size: int) -> int:
    """Queries whose heads of one KV head fit a tile."""
    return TILE_ROWS // group_size


def item_words(group_size: int) -> int:
    """Words of one ITEM, a multiple of 16 bytes."""
    return I_QUERIES + -(-queries_per_tile(group_size) // 4) * 4


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
G_ORDER = 0  # ORDER word of the tile's first growth block
G_INDEX = 1  # which of the tile's growing requests it is ...
G_GROWING = 2  # ... of how many (I_GROWING)
G_KEY = 3  # key of its columns
G_LEN = 4  # its KV tokens when the plan was made: its step is seq_len - G_LEN
GROWTH_WORDS = 5


def has_bit_keys(group_size: int) -> bool:
    """Whether a key is one bit a query (True) or first row | end row << 16 (False)."""
    return queries_per_tile(group_size) <= 32


def make_key(first: int, end: int, group_size: int) -> int:
    """Key of columns for queries [first, end) of a tile, as an int32."""
    if TILE_ROWS // group_size <= 32:  # has_bit_keys; the planner compiles this function by itself
        key = (1 << end) - (1 << first)
    else:
        key = first * group_size | end * group_size << 16
    return key - (1 << 32) if key >> 31 else key
