"""Blocks of a plan that nothing has been written to."""

import torch

from sgl_prefix_attn.execute.interpreter import Blocks
from sgl_prefix_attn.kernels import words as W


def poisoned_blocks(num_blocks: int, slot: int) -> Blocks:
    """Blocks whose every entry names `slot`, for every row."""
    entries = num_blocks * W.BLOCK
    return Blocks(
        torch.full((entries,), slot, dtype=torch.int32),
        torch.full((entries,), -1, dtype=torch.int32),
    )
