"""Runs one provider on one case: correct first, then time. Yields the rows of the result file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch

from eval.bench_kernel.case import Case, build_case
from eval.bench_kernel.floor import Rates, floor_us
from eval.bench_kernel.oracle import Oracle
from eval.bench_kernel.providers.base import Provider, Unsupported
from eval.bench_kernel.trees import Tree, page_problem
from sgl_prefix_attn.calibration.timing import LayerTimer, plan_us
from sgl_prefix_attn.records import HeadConfig


class DeviceLost(RuntimeError):
    """A provider broke the CUDA context: nothing can run in this process any more."""


@dataclass(frozen=True)
class Row:
    """One line of the result file; us and plan_us only where status is "ok".

    us          microseconds a layer, median
    plan_us     microseconds of host time that planning one batch takes
    page_size   of the comparison; run_page_size is the provider's own, where it differs
    error       ||out - truth|| / ||truth||; error_torch is low-precision torch's
    timing      "graph" (replay) or "eager" (launched one by one)
    status      "ok", or "wrong", "unavailable", "unsupported", "failed" followed by the reason
    """

    tree: str
    heads: str
    head_dim: int
    page_size: int
    dtype: str
    provider: str
    status: str
    floor_us: float
    us: float | None = None
    plan_us: float | None = None
    error: float | None = None
    error_torch: float | None = None
    timing: str | None = None
    run_page_size: int | None = None

    def as_dict(self) -> dict:
        return asdict(self)


@dataclass(frozen=True)
class Setting:
    """What all providers of one comparison have in common."""

    tree: Tree
    heads: HeadConfig
    page_size: int
    dtype_name: str
    dtype: torch.dtype
    device: torch.device
    seed: int


def compare(
    setting: Setting, providers: list[Provider], rates: Rates, reasons: dict[str, str]
) -> Iterator[Row]:
    """Rows of all providers on one tree; `reasons` has those that are not available.

    Cases (one a page size) live only as long as this call: their pools are gigabytes.
    """
    cases: dict[int, tuple[Case, Oracle]] = {}

    def case_at(page_size: int) -> tuple[Case, Oracle]:
        if page_size not in cases:
            s = setting
            case = build_case(s.tree, s.heads, page_size, s.dtype, s.device, s.seed)
            cases[page_size] = (case, Oracle(case))
        return cases[page_size]

    for provider in sorted(providers, key=lambda p: p.page_size(setting.page_size)):
        page_size = provider.page_size(setting.page_size)
        problem = page_problem(setting.tree, page_size)
        if provider.name in reasons:
            row = _row(setting, provider, rates, f"unavailable: {reasons[provider.name]}")
        elif problem is not None:
            row = _row(setting, provider, rates, f"unsupported: {problem}")
        else:
            for other in [size for size in cases if size != page_size]:
                del cases[other]
            row = _measure(setting, provider, rates, lambda p=page_size: case_at(p))
        yield row


def _row(setting: Setting, provider: Provider, rates: Rates, status: str, **measured) -> Row:
    page_size = provider.page_size(setting.page_size)
    return Row(
        tree=setting.tree.name,
        heads=f"{setting.heads.num_qo_heads}/{setting.heads.num_kv_heads}",
        head_dim=setting.heads.head_dim,
        page_size=setting.page_size,
        dtype=setting.dtype_name,
        provider=provider.name,
        status=status,
        floor_us=round(floor_us(setting.tree, setting.heads, setting.dtype.itemsize, rates), 3),
        run_page_size=None if page_size == setting.page_size else page_size,
        **measured,
    )


def _measure(
    setting: Setting,
    provider: Provider,
    rates: Rates,
    make_case: Callable[[], tuple[Case, Oracle]],
) -> Row:
    try:
        case, oracle = make_case()
        status, measured = _check_and_time(provider, case, oracle)
    except Unsupported as reason:
        status, measured = f"unsupported: {reason}", {}
    except Exception as error:  # whatever a third-party kernel raises is a line of the table
        status, measured = f"failed: {type(error).__name__}: {str(error)[:200]}", {}
    row = _row(setting, provider, rates, status, **measured)
    if setting.device.type == "cuda":
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError as error:
            raise DeviceLost(f"{provider.name} on {setting.tree.name}: {error}") from error
    return row


def _check_and_time(provider: Provider, case: Case, oracle: Oracle) -> tuple[str, dict]:
    runnable = provider.prepare(case)
    _poison_allocator(case)
    error = oracle.error(runnable.run(0))
    measured = {"error": error.norm, "error_torch": oracle.error_torch.norm}
    problem = oracle.problem(error)
    if problem is not None:
        return f"wrong: {problem}", measured
    timer = LayerTimer(runnable.run, case.num_layers, case.device, provider.capturable)
    us = timer.us()
    # What was timed must be right too: poison its outputs, replay, judge again.
    for out in timer.outs:
        out.fill_(float("nan"))
    timer.replay()
    error = oracle.error(timer.outs[0])
    problem = oracle.problem(error)
    if problem is not None:
        return f"wrong: after replay, {problem}", measured
    measured |= {"us": us, "timing": timer.kind, "plan_us": plan_us(runnable.plan, case.device)}
    return "ok", measured


def _poison_allocator(case: Case) -> None:
    """Leave NaN in freed memory of the output's size: providers that allocate their own output
    get poisoned memory from torch's allocator."""
    for _ in range(4):
        torch.full_like(case.q, float("nan"))
