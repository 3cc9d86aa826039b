"""All providers on one tree. Yields result rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch

from eval.bench_kernel.behind_products import BehindProducts
from eval.bench_kernel.case import DTYPE, Case, build_case, num_pools
from eval.bench_kernel.floor import Rates, floor_us, kv_bytes
from eval.bench_kernel.oracle import Oracle
from eval.bench_kernel.providers.provider import Provider, Unsupported
from eval.bench_kernel.trees import Tree, page_problem
from eval.bench_kernel.turns import take_turns
from sgl_prefix_attn.records import HeadConfig
from sgl_prefix_attn.tools.calibrate.timing import LayerTimer

# KV pools of several page sizes that may be in memory at once.
_MAX_POOL_BYTES = 40e9
# Of the KV cache, as tables and --kv-dtype name them.
DTYPE_NAMES = {DTYPE: "bf16", torch.float8_e4m3fn: "fp8_e4m3"}
_MEASURED = ("us", "us_rounds", "plan_us", "error", "error_torch", "timing")


@dataclass(frozen=True)
class Setting:
    """What all providers of one comparison have in common.

    behind_products  each layer's attention is timed behind products, as in a model
    """

    tree: Tree
    heads: HeadConfig
    page_size: int
    device: torch.device
    seed: int
    kv_dtype: torch.dtype = DTYPE
    behind_products: bool = False


def compare(setting: Setting, providers: list[Provider], rates: Rates) -> Iterator[dict]:
    """Yield rows of all providers on one tree."""
    for group in _groups(setting, providers):
        yield from _rows(setting, group, rates)


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


def _rows(setting: Setting, providers: list[Provider], rates: Rates) -> list[dict]:
    """Make the rows of a group; run_page_size is a provider's own, where it differs from the
    comparison's. Cases and oracles are gigabytes: they live as long as this call."""
    s, narrow = setting, setting.kv_dtype != DTYPE

    @cache
    def case(page_size: int) -> Case:
        if problem := page_problem(s.tree, page_size):
            raise Unsupported(problem)
        return build_case(
            s.tree, s.heads, page_size, DTYPE, s.device, seed=s.seed, kv_dtype=s.kv_dtype
        )

    @cache
    def oracle(page_size: int, narrows: bool) -> Oracle:
        return Oracle(case(page_size), narrows=narrows)

    def case_of(provider: Provider) -> tuple[Case, Oracle]:
        page_size = provider.page_size(s.page_size)
        return case(page_size), oracle(page_size, provider.narrows and narrow)

    def known(provider: Provider) -> dict:
        page_size = provider.page_size(s.page_size)
        return shared | {
            "provider": provider.name,
            "run_page_size": None if page_size == s.page_size else page_size,
        }

    shared = {
        "tree": s.tree.name,
        "heads": f"{s.heads.num_qo_heads}/{s.heads.num_kv_heads}",
        "head_dim": s.heads.head_dim,
        "page_size": s.page_size,
        "dtype": DTYPE_NAMES[s.kv_dtype],
        "floor_us": round(floor_us(s.tree, s.heads, rates, s.kv_dtype.itemsize), 3),
        **dict.fromkeys(_MEASURED),
    }
    timer = BehindProducts if s.behind_products else LayerTimer
    return take_turns(providers, known, case_of, s.device, timer=timer)
