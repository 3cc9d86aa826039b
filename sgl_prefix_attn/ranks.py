"""What tensor-parallel ranks have to agree on: captured all-reduces need the same graph on each."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed


def cpu_group(runner):
    """The process group of CPU tensors of a ModelRunner's tensor-parallel ranks, None for one."""
    return runner.tp_group.cpu_group if runner.ps.tp_size > 1 else None


def agreement(runner) -> Callable[[bool], bool]:
    """A function that tells whether every tensor-parallel rank of a ModelRunner passed True.

    All ranks must call it at the same steps; with one rank it is the identity.
    """
    group = cpu_group(runner)
    if group is None:
        return lambda ok: ok

    def agree(ok: bool) -> bool:
        flag = torch.tensor([ok], dtype=torch.int32)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN, group=group)
        return bool(flag.item())

    return agree
