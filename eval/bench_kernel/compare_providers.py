"""All providers on one tree. Yields result rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from eval.bench_kernel.case import DTYPE, Case, build_case, num_pools
from eval.bench_kernel.floor import Rates, floor_us, kv_bytes
from eval.bench_kernel.oracle import Oracle
from eval.bench_kernel.providers.provider import Provider
from eval.bench_kernel.trees import Tree, page_problem
from eval.bench_kernel.turns import Entry, take_turns
from sgl_prefix_attn.records import HeadConfig

# KV pools of several page sizes that may be in memory at once.
_MAX_POOL_BYTES = 40e9
# Of the KV cache, as tables and --kv-dtype name them.
DTYPE_NAMES = {DTYPE: "bf16", torch.float8_e4m3fn: "fp8_e4m3"}
_MEASURED = ("us", "us_rounds", "plan_us", "error", "error_torch", "timing")


@dataclass(frozen=True)
class Setting:
    """What all providers of one comparison have in common."""

    tree: Tree
    heads: HeadConfig
    page_size: int
    device: torch.device
    seed: int
    kv_dtype: torch.dtype = DTYPE


def compare(setting: Setting, providers: list[Provider], rates: Rates) -> Iterator[dict]:
    """Yield rows of all providers on one tree."""
    for group in _groups(setting, providers):
        entries = [_entry(setting, provider, rates) for provider in group]
        # gigabytes: of this group alone
        cases: dict[int, Case] = {}
        oracles: dict[tuple[int, bool], Oracle] = {}

        def case_of(provider: Provider, cases=cases, oracles=oracles) -> tuple[Case, Oracle]:
            page_size, s = provider.page_size(setting.page_size), setting
            narrows = provider.narrows and s.kv_dtype != DTYPE
            if page_size not in cases:
                cases[page_size] = build_case(
                    s.tree, s.heads, page_size, DTYPE, s.device, s.seed, kv_dtype=s.kv_dtype
                )
            if (page_size, narrows) not in oracles:
                oracles[page_size, narrows] = Oracle(cases[page_size], narrows=narrows)
            return cases[page_size], oracles[page_size, narrows]

        take_turns(entries, case_of, setting.device)
        yield from (entry.row for entry in entries)


def _groups(setting: Setting, providers: list[Provider]) -> list[list[Provider]]:
    """Group providers that are timed in turn, by page size: all, unless the pools, one set for each
    page size, would not fit into memory together; then those of one page size at a time."""

    def page_size(provider: Provider) -> int:
        return provider.page_size(setting.page_size)

    providers = sorted(providers, key=page_size)
    sizes = sorted(set(map(page_size, providers)))
    shape = (setting.tree.unique_tokens, setting.heads, setting.kv_dtype.itemsize)
    if len(sizes) * num_pools(*shape) * kv_bytes(*shape) <= _MAX_POOL_BYTES:
        return [providers]
    return [[p for p in providers if page_size(p) == size] for size in sizes]


def _entry(setting: Setting, provider: Provider, rates: Rates) -> Entry:
    """Make a row; run_page_size is the provider's own, where it differs from the comparison's."""
    page_size, status = provider.page_size(setting.page_size), "ok"
    if reason := provider.available():
        status = f"unavailable: {reason}"
    elif problem := page_problem(setting.tree, page_size):
        status = f"unsupported: {problem}"
    floor = floor_us(setting.tree, setting.heads, rates, setting.kv_dtype.itemsize)
    row = {
        "tree": setting.tree.name,
        "heads": f"{setting.heads.num_qo_heads}/{setting.heads.num_kv_heads}",
        "head_dim": setting.heads.head_dim,
        "page_size": setting.page_size,
        "dtype": DTYPE_NAMES[setting.kv_dtype],
        "provider": provider.name,
        "status": status,
        "floor_us": round(floor, 3),
        **dict.fromkeys(_MEASURED),
        "run_page_size": None if page_size == setting.page_size else page_size,
    }
    return Entry(provider, row)
