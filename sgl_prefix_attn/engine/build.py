"""Planner, executor and predictor of a server: one family of kernels, sized once for the largest
batch that SGLang may run."""

import logging
import os
from dataclasses import dataclass

import torch

from sgl_prefix_attn.engine.ranks import of_first_rank
from sgl_prefix_attn.execute.backends.choice import new_backend, why_no_row_tiles
from sgl_prefix_attn.execute.backends.family import ROW_TILES, TRITON, Family, choose_family
from sgl_prefix_attn.execute.executor import PlanExecutor
from sgl_prefix_attn.execute.self_test_process import (
    Subject,
    Verdict,
    remember,
    remembered,
    run_self_test,
)
from sgl_prefix_attn.plan import Planner
from sgl_prefix_attn.plan.capacity import Capacity
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.row_tile_planner import RowTilePlanner
from sgl_prefix_attn.plan.row_tile_time import RowTileRates
from sgl_prefix_attn.plan.tile_defaults import default_tile_set
from sgl_prefix_attn.predict.predictor import Predictor, RowTilePredictor
from sgl_prefix_attn.predict.record import Calibration
from sgl_prefix_attn.predict.row_tile_rates import row_tile_rates
from sgl_prefix_attn.predict.startup import default_costs, find_calibration, gpu_key
from sgl_prefix_attn.predict.store import verdict_folder, versions
from sgl_prefix_attn.records import HeadConfig, PathTable, StepPlan
from sgl_prefix_attn.settings import PREFIX, Settings
from sgl_prefix_attn.step.evaluate import StepPlanner, TimePredictor

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Execution:
    """One family's planner and kernels; predictor: of its plans, None on a CPU."""

    planner: StepPlanner
    executor: PlanExecutor
    predictor: TimePredictor | None


def build(runner, heads: HeadConfig, settings: Settings) -> Execution:
    """Build what runs prefix steps over the heads of a ModelRunner's layers, and log its family.

    Raises ValueError where row tiles are wanted that cannot run, or for a headroom that does not
    fit the device's memory; RuntimeError where they are wanted and fail their self-test.
    """
    _check_headroom(settings.headroom, runner.req_to_token_pool.size, torch.device(runner.device))
    calibration = _calibration(runner, heads)
    why_not = why_no_row_tiles(torch.device(runner.device), heads, runner.dtype)
    family = choose_family(settings.kernels, settings.strategy, why_not)
    if family.name == ROW_TILES:
        wanted = settings.kernels == ROW_TILES
        verdict = of_first_rank(lambda: self_test_verdict(runner, heads, again=wanted))
        if verdict.why_not is not None:
            if wanted:
                raise RuntimeError(
                    f"SGL_PREFIX_ATTN_KERNELS=row_tiles: they failed at start: {verdict.why_not}"
                )
            logger.error("row tiles failed at start: %s", verdict.why_not)
            family = Family(TRITON, "failed_at_start")
    logger.info("--attention-backend prefix: prefix steps run %s", family)
    make = _row_tiles if family.name == ROW_TILES else _packs
    return make(runner, heads, settings, calibration)


def self_test_verdict(runner, heads: HeadConfig, again: bool) -> Verdict:
    """What the self-test of row tiles said, now or at an earlier start; it does not raise.

    again: a failure is not remembered, so that one that has passed by does not stay.
    """
    from sgl_prefix_attn.engine.model_facts import attention_layers

    device = torch.device(runner.device)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    soft_cap = max((layer.logit_cap for layer in attention_layers(runner)), default=0.0)
    dtype = str(runner.dtype).removeprefix("torch.")
    subject = Subject.of(gpu, heads, dtype, soft_cap, versions())
    folder = verdict_folder()
    if folder is not None:
        known = remembered(folder, subject)
        if known is not None and (known.why_not is None or not again):
            return known
    logger.info("trying the row-tile kernels, once for these versions: %s", subject)
    here = f"cuda:{torch.cuda.current_device()}" if device.type == "cuda" else device.type
    verdict = run_self_test(subject, here)
    if folder is not None:
        remember(folder, verdict)
    return verdict


def _row_tiles(
    runner, heads: HeadConfig, settings: Settings, calibration: Calibration | None
) -> Execution:
    # Not every Triton has Gluon.
    from sgl_prefix_attn.execute.backends.gluon_backend import GluonBackend

    device = torch.device(runner.device)
    backend = GluonBackend(heads, runner.dtype, device, pdl=True)
    capacity = backend.server_capacity(
        runner.req_to_token_pool.size, runner.max_total_num_tokens, settings.headroom
    )
    planner = RowTilePlanner(
        heads,
        num_sms=backend.num_sms,
        rates=RowTileRates() if calibration is None else row_tile_rates(calibration),
        headroom=settings.headroom,
        capacity=capacity,
    )
    planner.warm_up()
    predictor = None if calibration is None else RowTilePredictor(calibration)
    return Execution(planner, PlanExecutor(backend, capacity), predictor)


def _packs(
    runner, heads: HeadConfig, settings: Settings, calibration: Calibration | None
) -> Execution:
    device = torch.device(runner.device)
    tile_set = default_tile_set(device, heads)
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
            default_costs(device, heads, runner.kv_cache_dtype)
            if calibration is None
            else calibration.costs
        ),
        headroom=settings.headroom,
        capacity=capacity,
    )
    planner.warm_up()
    backend = new_backend(device, heads, runner.dtype, tile_set)
    predictor = None if calibration is None else Predictor(calibration)
    return Execution(planner, PlanExecutor(backend, capacity), predictor)


def _check_headroom(headroom: int, max_batch: int, device: torch.device) -> None:
    """Raise ValueError where spare index slots would fill the memory, or would be more than the
    plan's int32 words can count. Row tiles keep a key beside each slot: 8 bytes, packs 4."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    else:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    wanted, most = 8 * headroom * max_batch, min(free, 8 * 2**30)
    if wanted > most:
        raise ValueError(
            f"{PREFIX}HEADROOM={headroom} takes {wanted:,} bytes for {max_batch} requests, where "
            f"{most:,} are possible: lower it, or --max-running-requests"
        )


def _calibration(runner, heads: HeadConfig) -> Calibration | None:
    """Find the first rank's calibration: another file on the others' disks changes nothing. All
    ranks of a tensor-parallel group call this."""
    device = torch.device(runner.device)
    if device.type != "cuda":
        return None
    key = gpu_key(device, heads, runner.kv_cache_dtype, runner.page_size)
    num_sms = default_tile_set(device, heads).num_sms
    return of_first_rank(lambda: find_calibration(key, num_sms))


def padding_plan(planner: StepPlanner) -> StepPlan:
    """Plan a batch without requests: a captured graph runs it without reading any KV."""
    return planner.plan_forest(build_forest(PathTable.of([], [], [], [])))
