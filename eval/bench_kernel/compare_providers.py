"""All providers on one tree: each prepared and judged, then timed in turn. Yields result rows."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch

from eval.bench_kernel.candidate import Candidate
from eval.bench_kernel.case import Case, build_case, num_pools
from eval.bench_kernel.floor import Rates, floor_us, kv_bytes
from eval.bench_kernel.oracle import Oracle, Wrong
from eval.bench_kernel.providers.provider import Provider, Unsupported
from eval.bench_kernel.trees import Tree, page_problem
from sgl_prefix_attn.records import HeadConfig

ROUNDS = 3
# KV pools of several page sizes that may be in memory at once.
_MAX_POOL_BYTES = 40e9


class DeviceLost(RuntimeError):
    """A provider broke the CUDA context: nothing can run in this process any more."""


@dataclass(frozen=True)
class Row:
    """One line of the result file; us, us_rounds and plan_us only where status is "ok".

    us          microseconds per layer, median over the rounds; us_rounds has each round's median
    plan_us     microseconds of host time that planning one batch takes
    page_size   of the comparison; run_page_size is the provider's own, where it differs
    error       ||out - truth|| / ||truth|| of the worst layer; error_torch is low-precision torch's
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
    us_rounds: list[float] | None = None
    plan_us: float | None = None
    error: float | None = None
    error_torch: float | None = None
    timing: str | None = None
    run_page_size: int | None = None


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
    layout: str = "permuted"


@dataclass
class _Entry:
    """A provider in a comparison and the row that becomes of it; `candidate` only while there is
    something left to do with it."""

    provider: Provider
    row: Row
    candidate: Candidate | None = None
    us_rounds: list[float] = field(default_factory=list)

    @property
    def is_ok(self) -> bool:
        return self.row.status == "ok"

    def end(self, status: str, **measured) -> None:
        self.row, self.candidate = replace(self.row, status=status, **measured), None


def compare(
    setting: Setting, providers: list[Provider], rates: Rates, reasons: dict[str, str]
) -> Iterator[Row]:
    """Yield rows of all providers on one tree; `reasons` has those that are not available.

    Raises DeviceLost after the rows of a comparison in which a provider broke the CUDA context.
    """
    for group in _groups(setting, providers):
        entries = [_entry(setting, provider, rates, reasons) for provider in group]
        try:
            _run([entry for entry in entries if entry.is_ok], setting)
        except DeviceLost as error:
            for entry in entries:
                if entry.is_ok and entry.row.us is None:
                    entry.end(f"failed: no GPU left to measure on, {error}")
            yield from (entry.row for entry in entries)
            raise
        yield from (entry.row for entry in entries)


def _groups(setting: Setting, providers: list[Provider]) -> list[list[Provider]]:
    """Group providers that are timed in turn, by page size: all, unless the pools, one set for each
    page size, would not fit into memory together; then those of one page size at a time."""

    def page_size(provider: Provider) -> int:
        return provider.page_size(setting.page_size)

    providers = sorted(providers, key=page_size)
    sizes = sorted(set(map(page_size, providers)))
    shape = (setting.tree, setting.heads, setting.dtype.itemsize)
    if len(sizes) * num_pools(*shape) * kv_bytes(*shape) <= _MAX_POOL_BYTES:
        return [providers]
    return [[p for p in providers if page_size(p) == size] for size in sizes]


def _entry(setting: Setting, provider: Provider, rates: Rates, reasons: dict[str, str]) -> _Entry:
    page_size, status = provider.page_size(setting.page_size), "ok"
    if provider.name in reasons:
        status = f"unavailable: {reasons[provider.name]}"
    elif problem := page_problem(setting.tree, page_size):
        status = f"unsupported: {problem}"
    row = Row(
        tree=setting.tree.name,
        heads=f"{setting.heads.num_qo_heads}/{setting.heads.num_kv_heads}",
        head_dim=setting.heads.head_dim,
        page_size=setting.page_size,
        dtype=setting.dtype_name,
        provider=provider.name,
        status=status,
        floor_us=round(floor_us(setting.tree, setting.heads, setting.dtype.itemsize, rates), 3),
        run_page_size=None if page_size == setting.page_size else page_size,
    )
    return _Entry(provider, row)


def _run(entries: list[_Entry], setting: Setting) -> None:
    """Prepare and judge all, time them round by round, judge what was timed. Cases (one per
    page size) and candidates live only as long as this call: they are gigabytes."""
    cases: dict[int, tuple[Case, Oracle]] = {}

    def case_at(page_size: int) -> tuple[Case, Oracle]:
        if page_size not in cases:
            s = setting
            case = build_case(s.tree, s.heads, page_size, s.dtype, s.device, s.seed, s.layout)
            cases[page_size] = (case, Oracle(case))
        return cases[page_size]

    def prepare(entry: _Entry) -> None:
        case, oracle = case_at(entry.provider.page_size(setting.page_size))
        entry.candidate = Candidate(entry.provider, case, oracle)

    def finish(entry: _Entry) -> None:
        candidate = entry.candidate
        candidate.judge_replay("timed")
        entry.end(
            "ok",
            us=statistics.median(entry.us_rounds),
            us_rounds=entry.us_rounds,
            plan_us=candidate.plan_us,
            error=candidate.error,
            error_torch=candidate.error_torch,
            timing=candidate.timing,
        )

    def each(step: Callable[[_Entry], None], order: list[_Entry]) -> None:
        for entry in order:
            if entry.is_ok:
                _attempt(step, entry, setting)

    each(prepare, entries)
    for i in range(ROUNDS):
        each(lambda entry: entry.us_rounds.append(entry.candidate.us()), entries[:: (-1) ** i])
    each(finish, entries)


def _attempt(step: Callable[[_Entry], None], entry: _Entry, setting: Setting) -> None:
    """Run a step of one entry; whatever goes wrong is its status, and ends it alone."""
    try:
        step(entry)
    except Wrong as wrong:
        entry.end(f"wrong: {wrong}", error=wrong.error, error_torch=wrong.error_torch)
    except Unsupported as reason:
        entry.end(f"unsupported: {reason}")
    except Exception as error:  # whatever a third-party kernel raises is a line of the table
        entry.end(f"failed: {type(error).__name__}: {str(error)[:200]}")
    if setting.device.type == "cuda":
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError as error:
            if entry.is_ok:
                entry.end(f"failed: {str(error)[:200]}")
            raise DeviceLost(f"{entry.provider.name} on {setting.tree.name}: {error}") from error
