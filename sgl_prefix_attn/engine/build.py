"""Planner and executor of a server: sized once for the largest batch that SGLang may run."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import torch

from sgl_prefix_attn.engine.ranks import cpu_group
from sgl_prefix_attn.execute.backends.choice import new_backend
from sgl_prefix_attn.execute.executor import PlanExecutor
from sgl_prefix_attn.plan import Planner
from sgl_prefix_attn.plan.capacity import Capacity
from sgl_prefix_attn.plan.tile_defaults import default_tile_set
from sgl_prefix_attn.predict.record import Calibration
from sgl_prefix_attn.predict.startup import agreed, default_costs, gpu_key
from sgl_prefix_attn.records import HeadConfig, PathTable, Plan
from sgl_prefix_attn.settings import PREFIX, Settings


@dataclass(frozen=True)
class Execution:
    """calibration: what the planner's costs come from, None on a CPU."""

    planner: Planner
    executor: PlanExecutor
    calibration: Calibration | None


def build(runner, heads: HeadConfig, settings: Settings) -> Execution:
    """Planner, executor and calibration for the heads of a ModelRunner's layers.

    Raises ValueError for a headroom that does not fit the device's memory.
    """
    _check_headroom(settings.headroom, runner.req_to_token_pool.size, torch.device(runner.device))
    tile_set = default_tile_set(runner.device, heads)
    calibration = _calibration(runner, heads, tile_set.num_sms)
    capacity = Capacity.for_server(
        max_batch=runner.req_to_token_pool.size,
        max_tokens=runner.max_total_num_tokens,
        headroom=settings.headroom,
        tile_set=tile_set,
        heads=heads,
    )
    planner = Planner(
        heads,
        tile_set=tile_set,
        strategy=settings.strategy,
        costs=(
            default_costs(runner.device, heads, runner.kv_cache_dtype)
            if calibration is None
            else calibration.costs
        ),
        headroom=settings.headroom,
        capacity=capacity,
    )
    planner.warm_up()
    backend = new_backend(torch.device(runner.device), heads, runner.dtype, tile_set)
    return Execution(planner, PlanExecutor(backend, capacity), calibration)


def _check_headroom(headroom: int, max_batch: int, device: torch.device) -> None:
    """Raise ValueError where spare index slots, 4 bytes each, would fill the memory, or would be
    more than the plan's int32 words can count."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    else:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    wanted, most = 4 * headroom * max_batch, min(free, 4 * 2**30)
    if wanted > most:
        raise ValueError(
            f"{PREFIX}HEADROOM={headroom} takes {wanted:,} bytes for {max_batch} requests, where "
            f"{most:,} are possible: lower it, or --max-running-requests"
        )


def _calibration(runner, heads: HeadConfig, num_sms: int) -> Calibration | None:
    """Find the calibration; all ranks of a tensor-parallel group call this."""
    device = torch.device(runner.device)
    if device.type != "cuda":
        return None
    key = gpu_key(device, heads, runner.kv_cache_dtype, runner.page_size)
    return agreed(key, num_sms, cpu_group())


def padding_plan(planner: Planner) -> Plan:
    """Plan a batch without requests: a captured graph runs it without reading any KV."""
    none = np.zeros(0, dtype=np.int32)
    return planner.plan(PathTable(none, none, none.astype(np.int64), none, none))
