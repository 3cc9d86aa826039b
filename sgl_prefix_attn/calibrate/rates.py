"""What this GPU sustains, measured with plans that do one thing only."""

import math

import numpy as np

from sgl_prefix_attn.calibrate.batches import level_nodes, path_table
from sgl_prefix_attn.calibrate.measure import BatchMeter
from sgl_prefix_attn.plan import Planner
from sgl_prefix_attn.plan.costs import GpuRates, known_rates, partial_bytes
from sgl_prefix_attn.plan.work import SHARED_CTAS
from sgl_prefix_attn.records import PathTable, PlanWork

MAX_QUERIES = 1024  # requests of the largest plan here
_MMA_LENGTHS = (4096, 16384)  # KV tokens that all queries share, for the rate of arithmetic
_PLAUSIBLE = 4.0  # a measured rate is at most so many times the table's, or its inverse


def min_pool(page_size: int) -> int:
    """Return how many KV tokens, with page rounding, the plans here need."""
    return max(1 << 17, 2 * MAX_QUERIES * page_size)


def measure_rates(
    meter: BatchMeter, planner: Planner, kv_bytes: int, pool_tokens: int, page_size: int
) -> GpuRates:
    """Measure with a planner of strategy `naive`: each node is a pack of its own then.

    Raises RuntimeError when times make no sense, as when something else runs on the GPU.
    """
    heads = planner.heads

    def timed(paths: PathTable) -> tuple[float, PlanWork]:
        plan = planner.plan(paths)
        return meter.prefix_us(plan, paths), plan.work

    padding = planner.plan(PathTable.of([], [], [], []))
    launch = meter.prefix_us(padding, unshared(1, 64))

    length = min(4096, pool_tokens // 128 // page_size * page_size)
    kv_token = 2 * heads.num_kv_heads * heads.head_dim * kv_bytes
    us, _ = timed(unshared(128, length))
    bandwidth = _per_us("bandwidth", 128 * length * kv_token, us - launch)

    (few_us, few), (many_us, many) = timed(nested((2,), 16)), timed(nested((4, 2), 16))
    moved = (many.shared_tokens - few.shared_tokens) * kv_token
    moved += (many.partials - few.partials) * partial_bytes(heads, kv_bytes)
    ctas = SHARED_CTAS * planner.tile_set.num_sms
    extra_items = (many.shared_items - few.shared_items) * heads.num_kv_heads / ctas
    item = (many_us - few_us - moved / bandwidth) / extra_items

    queries = full_waves(planner, ctas)
    (short_us, short), (long_us, long) = (
        timed(nested((queries,), n, queries)) for n in _MMA_LENGTHS
    )
    flops = 4.0 * heads.num_qo_heads * heads.head_dim * queries
    flops *= long.shared_tokens - short.shared_tokens
    mma = _per_us("mma", flops, long_us - short_us)
    try:
        return GpuRates(bandwidth=bandwidth, mma=mma, item=item, ctas=ctas, launch=launch)
    except ValueError as error:
        raise RuntimeError(f"measured rates make no sense: {error}") from None


def _per_us(name: str, amount: float, us: float) -> float:
    if us <= 0:
        raise RuntimeError(f"measured rates make no sense: {name}: {amount:.4g} took {us:.4g} us")
    return amount / us


def check_plausible(rates: GpuRates, gpu: str) -> None:
    """Raise RuntimeError with the numbers if a known GPU was far from what it sustains."""
    known = known_rates(gpu)
    if known is None:
        return
    for name in ("bandwidth", "mma", "item", "launch"):
        measured, usual = getattr(rates, name), getattr(known, name)
        if not 1 / _PLAUSIBLE <= measured / usual <= _PLAUSIBLE:
            raise RuntimeError(
                f"{gpu}: measured {name} {measured:.4g}, usual is {usual:.4g}: is another process "
                f"using the GPU? All measured: {rates}"
            )


def unshared(requests: int, length: int) -> PathTable:
    """Make requests that share nothing."""
    return PathTable.of([], [], [-1] * requests, [length] * requests)


def full_waves(planner: Planner, ctas: int) -> int:
    """Find how many queries over one stretch of KV, half of MAX_QUERIES or more, leave the fewest
    of `ctas` idle in the last wave of work items, else that wave is what would be timed."""

    def busy(queries: int) -> float:
        plans = [planner.plan(nested((queries,), n, queries)) for n in _MMA_LENGTHS]
        waves = [plan.work.shared_items * planner.heads.num_kv_heads / ctas for plan in plans]
        return min(wave / math.ceil(wave) for wave in waves)

    step = max(1, planner.tile_set.shared[-1].block_m // planner.heads.group_size)
    return max(range(MAX_QUERIES, MAX_QUERIES // 2, -step), key=busy)


def nested(groups: tuple[int, ...], length: int, requests: int = MAX_QUERIES) -> PathTable:
    """Make requests with a token of their own; every groups[i] neighbours share a node of `length`
    tokens below that of the groups[i - 1] around them."""
    nodes, first = level_nodes([requests // group for group in groups], [length] * len(groups))
    rows = np.arange(requests)
    prefix = np.full(requests, len(groups) * length)
    return path_table(nodes, first + rows // groups[-1], prefix, np.ones(requests))
