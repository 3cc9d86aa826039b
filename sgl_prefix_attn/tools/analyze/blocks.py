"""Names of a prompt's blocks. A block is named by a hash of all that stands before it too, so that
equal names mean equal prefixes; and how many tokens are behind a trace's hash ids."""

from __future__ import annotations

import numpy as np

from sgl_prefix_attn.jit import cached_njit

LARGEST = 8192  # tokens of a block that is inferred
ASKED = 256  # of the longest prompts, which tell sizes apart best
AGREE = 0.9  # of them must have as many hash ids as the size makes


@cached_njit
def block_names(content, per_block, prompt, block_tokens):
    """Name a prompt's blocks, uint64 [...], from `per_block` numbers each, as far as content goes;
    a last one that holds fewer tokens has a name of its own."""
    most = -(-prompt // block_tokens)
    size = min(most, -(-content.size // per_block))
    names = np.empty(size, np.uint64)
    name = np.uint64(0x9E3779B97F4A7C15)
    for i in range(size):
        begin = i * per_block
        for j in range(begin, min(begin + per_block, content.size)):
            name = _mixed(name ^ content[j])
        name = _mixed(name ^ np.uint64(min(block_tokens, prompt - i * block_tokens)))
        names[i] = name
    return names


@cached_njit
def _mixed(x):
    """The finalizer of SplitMix64."""
    x = (x + np.uint64(0x9E3779B97F4A7C15)) & np.uint64(0xFFFFFFFFFFFFFFFF)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@cached_njit
def name_hash_ids(blocks, rows, block_tokens):
    """Put names in the place of hash ids, one a block, of the rows of a trace."""
    for row in rows:
        end = row.first + row.num_blocks
        blocks[row.first : end] = block_names(blocks[row.first : end], 1, row.prompt, block_tokens)


def inferred_block_tokens(prompt: np.ndarray, count: np.ndarray) -> int:
    """Return the tokens of a block with which prompts int [n] have so many hash ids int [n]: of
    sizes that fit equally well the smallest power of two, else the smallest.

    Raises ValueError where no size fits most of them.
    """
    longest = np.argsort(count, kind="stable")[-ASKED:]
    prompt, count = prompt[longest].astype(np.int64), count[longest]
    sizes = np.arange(1, LARGEST + 1)
    agreeing = (-(-prompt // sizes[:, None]) == count).mean(axis=1)
    if agreeing.max() >= AGREE:
        best = sizes[agreeing == agreeing.max()]
        powers = best[best & (best - 1) == 0]
        return int((powers if powers.size else best)[0])
    ratio = prompt.sum() / max(1, count.sum())
    raise ValueError(
        f"how many tokens are behind a hash id cannot be told: {ratio:,.1f} on average, but no "
        "size fits all prompts"
    )
