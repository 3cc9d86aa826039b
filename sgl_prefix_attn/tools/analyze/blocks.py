"""Names of a prompt's blocks. A block is named by a hash of all that stands before it too, so that
equal names mean equal prefixes; and how many tokens are behind a trace's hash ids."""

from __future__ import annotations

import numpy as np

LARGEST = 8192  # tokens of a block that is inferred
ASKED = 256  # of the longest prompts, which tell sizes apart best
AGREE = 0.9  # of them must have as many hash ids as the size makes


def block_names(content: np.ndarray, per_block: int, prompt: int, block_tokens: int) -> np.ndarray:
    """Name a prompt's blocks, uint64 [...], from `per_block` numbers each, as far as content goes;
    a last one that holds fewer tokens has a name of its own."""
    names, name = [], 0
    for i in range(min(-(-prompt // block_tokens), -(-content.size // per_block))):
        part = content[i * per_block : (i + 1) * per_block].tobytes()
        name = hash((name, part, min(block_tokens, prompt - i * block_tokens)))
        names.append(name)
    return np.array(names, np.int64).view(np.uint64)


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
