"""What tensor-parallel ranks have to agree on: captured all-reduces need the same graph on each."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed


def agreement(runner) -> Callable[[bool], bool]:
    """A function that tells whether every tensor-parallel rank of a ModelRunner passed True.

    All ranks must call it at the same steps; with one rank it is the identity.
    """
    if runner.ps.tp_size == 1:
        return lambda ok: ok
    group = runner.tp_group.cpu_group

    def agree(ok: bool) -> bool:
        flag = torch.tensor([ok], dtype=torch.int32)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN, group=group)
        return bool(flag.item())

    return agree
