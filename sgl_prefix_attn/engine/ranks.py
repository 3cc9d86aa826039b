"""What tensor-parallel ranks have to agree on: captured all-reduces need the same graph on each,
and a rank that asks the others at a step at which they do not ask waits for ever.
"""

import logging
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed

from sgl_prefix_attn.engine import sglang_config
from sgl_prefix_attn.settings import VARIABLES, Settings

T = TypeVar("T")
logger = logging.getLogger(__name__)


def cpu_group():
    """Return the CPU process group of the tensor-parallel ranks, None for one rank."""
    ranks = sglang_config.parallel()
    return ranks.tp_group.cpu_group if ranks.tp_size > 1 else None


def of_first_rank(make: Callable[[], T]) -> T:
    """Call make() on the first tensor-parallel rank and return its result on all of them; every
    rank calls this, and make() must not raise: the others would wait."""
    group = cpu_group()
    if group is None:
        return make()
    message: list = [make() if torch.distributed.get_rank(group) == 0 else None]
    torch.distributed.broadcast_object_list(message, group=group, group_src=0)
    return message[0]


def prepared(
    what: str, prepare: Callable[[], T], only_stock: Callable[[str], None]
) -> T | None:  # fmt: skip
    """Return what prepare() makes of the next batch; None after an error, from which on only stock
    attention is to run. With several ranks it is raised: the others would wait for this one."""
    try:
        return prepare()
    except Exception:
        if sglang_config.parallel().tp_size > 1:
            raise
        logger.exception("%s could not be prepared", what)
        only_stock("internal_error")
        return None


def raise_unless_alike(settings: Settings, group) -> None:
    """Raise ValueError naming a variable that is not the same on all ranks of cpu_group(); every
    rank of a group calls this."""
    if group is None:
        return
    everyone: list = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(everyone, settings, group=group)
    for variable in VARIABLES:
        values = [getattr(other, variable.field) for other in everyone]
        if len(set(values)) > 1:
            raise ValueError(
                f"{variable.name} differs between tensor-parallel ranks: "
                f"{', '.join(map(str, values))}. Set it alike on every node"
            )


def agreement() -> Callable[[bool], bool]:
    """Make a function that tells whether every tensor-parallel rank passed True.

    All ranks must call it at the same steps; with one rank it is the identity.
    """
    group = cpu_group()
    if group is None:
        return lambda ok: ok

    def agree(ok: bool) -> bool:
        flag = torch.tensor([ok], dtype=torch.int32)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN, group=group)
        return bool(flag.item())

    return agree
