"""The calibration that a server starts with, the same on all of its tensor-parallel ranks."""

from __future__ import annotations

import logging

import torch
import torch.distributed

from sgl_prefix_attn.calibration import store
from sgl_prefix_attn.calibration.codec import decode, encode
from sgl_prefix_attn.calibration.record import Calibration, CalibrationKey

logger = logging.getLogger(__name__)


def agreed(key: CalibrationKey, num_sms: int, group=None) -> Calibration:
    """The first rank looks (store.find) and logs what it found; the others take it from there, so
    that another file on their disk changes nothing.

    group  process group of CPU tensors that all ranks call this with, None: one rank
    """
    if group is None:
        return _found(key, num_sms)
    message = [None]
    if torch.distributed.get_rank(group) == 0:
        message = [encode(_found(key, num_sms))]
    torch.distributed.broadcast_object_list(message, group=group, group_src=0)
    return decode(message[0])


def gpu_key(device: torch.device, heads, dtype: torch.dtype, page_size: int) -> CalibrationKey:
    name = torch.cuda.get_device_name(device)
    return CalibrationKey(name, heads, str(dtype).removeprefix("torch."), page_size)


def _found(key: CalibrationKey, num_sms: int) -> Calibration:
    found = store.find(key, num_sms)
    level = logging.WARNING if found.calibration.source == "conservative" else logging.INFO
    logger.log(level, "%s", found.message)
    return found.calibration
