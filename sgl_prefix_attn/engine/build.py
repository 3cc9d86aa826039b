"""Planner, executor and predictor of a server: one family of kernels, sized once for the largest
batch that SGLang may run."""

import logging
import os
from dataclasses import dataclass

import torch

from sgl_prefix_attn.engine import determinism
from sgl_prefix_attn.engine.ranks import of_first_rank
from sgl_prefix_attn.execute.backends.choice import capabilities_on, new_backend, why_no_hopper
from sgl_prefix_attn.execute.backends.family import HOPPER, PORTABLE, Family, choose_family
from sgl_prefix_attn.execute.executor import PlanExecutor
from sgl_prefix_attn.execute.self_test_process import (
    Subject,
    Verdict,
    remember,
    remembered,
    run_self_test,
)
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.plan import Plan
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.predict.predictor import Predictor
from sgl_prefix_attn.predict.record import Calibration, rates_of
from sgl_prefix_attn.predict.startup import find_calibration, gpu_key
from sgl_prefix_attn.predict.store import verdict_folder, versions
from sgl_prefix_attn.records import HeadConfig, PathTable
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.step.evaluate import TimePredictor

logger = logging.getLogger(__name__)


class NoKernels(Exception):
    """No kernels are left that could run plans; the message is a label of metrics."""


@dataclass(frozen=True)
class Execution:
    """Planner and kernels; predictor: of both times, None on a CPU."""

    planner: Planner
    executor: PlanExecutor
    predictor: TimePredictor | None


def build(runner, heads: HeadConfig, settings: Settings, fallback: str) -> Execution:
    """Build what runs prefix steps over the heads of a ModelRunner's layers, and log its family.

    fallback  the backend that runs stock steps, whose times decide which steps these are

    Raises ValueError where kernels are wanted that cannot run, or for plans or a headroom that do
    not fit the device's memory; RuntimeError where they are wanted and fail their self-test;
    NoKernels where they fail it and there are no others for such heads.
    """
    device = torch.device(runner.device)
    _check_headroom(settings.headroom, runner.req_to_token_pool.size, device)
    why_not = why_no_hopper(device, heads, runner.dtype, runner.kv_cache_dtype)
    no_portable = capabilities_on(device).why_not(heads, runner.dtype, runner.kv_cache_dtype)
    family = choose_family(settings.kernels, settings.strategy, why_not, no_portable)
    if family.name == HOPPER:
        wanted = settings.kernels == HOPPER
        verdict = of_first_rank(lambda: self_test_verdict(runner, heads, again=wanted))
        if verdict.why_not is not None:
            if wanted:
                raise RuntimeError(
                    f"PREFIX_ATTN_KERNELS={HOPPER}: they failed at start: {verdict.why_not}"
                )
            logger.error(
                "Hopper's kernels failed at start: %s (sgl-prefix-attn doctor: how to try again)",
                verdict.why_not,
            )
            family = Family(PORTABLE, "failed_at_start")
            if no_portable is not None:
                raise NoKernels(family.why_not)
    logger.info("--attention-backend prefix: prefix steps run %s", family)
    calibration = _calibration(runner, heads, family.name, fallback)
    part_tokens = determinism.part_tokens(runner.server_args)
    backend = new_backend(
        family.name, device, heads, runner.dtype, pdl=True, part_tokens=part_tokens
    )
    requests = runner.req_to_token_pool.size
    capacity = backend.server_capacity(
        requests, runner.max_total_num_tokens, settings.headroom, runner.model_config.context_len
    )
    check_workspace(
        backend.workspace_bytes(capacity), runner, f"{requests} requests", "--max-running-requests"
    )
    planner = backend.planner(
        rates_of(family.name, heads)() if calibration is None else calibration.kernel_rates,
        strategy=settings.strategy,
        headroom=settings.headroom,
        capacity=capacity,
    )
    planner.warm_up()
    predictor = None if calibration is None else Predictor(calibration)
    return Execution(planner, PlanExecutor(backend, capacity), predictor)


def self_test_verdict(runner, heads: HeadConfig, again: bool) -> Verdict:
    """What the self-test of Hopper's kernels said, now or at an earlier start; it does not raise.

    again: a failure is not remembered, so that one that has passed by does not stay.
    """
    from sgl_prefix_attn.engine.model_facts import planned_layers, sinks_dtype

    device = torch.device(runner.device)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    soft_cap = max((layer.logit_cap for layer in planned_layers(runner)), default=0.0)
    sinks = sinks_dtype(runner)
    subject = Subject(
        gpu, heads, _name(runner.dtype), soft_cap, versions(),
        sinks="" if sinks is None else _name(sinks), kv_dtype=_name(runner.kv_cache_dtype),
        part_tokens=determinism.part_tokens(runner.server_args),
    )  # fmt: skip
    folder = verdict_folder()
    if folder is not None:
        known = remembered(folder, subject)
        if known is not None and (known.why_not is None or not again):
            return known
    logger.info("trying Hopper's kernels, once for these versions: %s", subject)
    here = f"cuda:{torch.cuda.current_device()}" if device.type == "cuda" else device.type
    verdict = run_self_test(subject, here)
    if folder is not None:
        remember(folder, verdict)
    return verdict


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_headroom(headroom: int, max_batch: int, device: torch.device) -> None:
    """Raise ValueError where spare index slots would fill the memory, or would be more than the
    plan's int32 words can count. Beside each slot there is a key."""
    wanted, most = 8 * headroom * max_batch, min(_free_bytes(device), 8 * 2**30)
    if wanted > most:
        raise ValueError(
            f"PREFIX_ATTN_HEADROOM={headroom} takes {wanted:,} bytes for {max_batch} requests, "
            f"where {most:,} are possible: lower it, or --max-running-requests"
        )


def check_workspace(wanted: int, runner, largest: str, *smaller: str, share: float = 1.0) -> None:
    """Log what memory plans of the largest batch take. Raise ValueError where they would fill more
    than a share of what is free; smaller: options that make them smaller."""
    free = int(share * _free_bytes(torch.device(runner.device)))
    if wanted > free:
        raise ValueError(
            f"plans of {largest} take {wanted:,} bytes, where {free:,} are free: lower "
            f"{' or '.join((*smaller, '--mem-fraction-static'))}, or, for deterministic inference, "
            "--context-length"
        )
    logger.info("plans of %s take %.0f MiB of memory", largest, wanted / 2**20)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _calibration(runner, heads: HeadConfig, family: str, fallback: str) -> Calibration | None:
    """Find the first rank's calibration: another file on the others' disks changes nothing. All
    ranks of a tensor-parallel group call this."""
    device = torch.device(runner.device)
    if device.type != "cuda":
        return None
    key = gpu_key(family, device, heads, runner.kv_cache_dtype, runner.page_size, fallback)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return of_first_rank(lambda: find_calibration(key, num_sms))


def padding_plan(planner: Planner) -> Plan:
    """Plan a batch without requests: a captured graph runs it without reading any KV."""
    return planner.plan_forest(build_forest(PathTable.of([], [], [], [])))
