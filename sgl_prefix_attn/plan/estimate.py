"""Microseconds per layer of a plan, from a few physical terms of its work.

The terms are launches, work items, partial results, and the larger of "all bytes at full
bandwidth" and "the longest chain of work on one CTA", softly (a p-norm). Coefficients are factors
of the cost model's or microseconds, so that they carry over to other head configurations, roughly:
terms that move together are not told apart. A calibration fits them to a GPU; until then they are
near what an H100 and an H200 showed.
"""

from sgl_prefix_attn.plan.costs import CostModel
from sgl_prefix_attn.records import PlanWork

# Name, start, lowest, highest of every coefficient, in the order of the formula below.
PREFIX_COEFFICIENTS = (
    ("launch", 7.0, 0.0, 50.0),
    ("merge", 0.5, 0.0, 20.0),  # us, when there are partial results
    ("item", 0.002, 0.0, 1.0),  # us per work item and KV head
    ("partial", 1.4, 0.0, 10.0),
    ("part", 0.09, 0.0, 2.0),  # us per partial result of one request: merge takes them in turn
    ("bandwidth", 0.8, 0.3, 4.0),
    ("reread", 0.15, 0.0, 4.0),
    ("mma", 0.3, 0.0, 4.0),
    ("chain", 1.9, 0.05, 20.0),
    ("both", 0.0, 0.0, 2.0),  # of the shorter chain: tails and shared tiles get in each other's way
    ("norm", 1.1, 1.0, 20.0),
)


def starts(coefficients: tuple) -> dict[str, float]:
    """Take what holds until something is fitted from a table such as PREFIX_COEFFICIENTS."""
    return {name: start for name, start, *_ in coefficients}


_PREFIX_START = tuple(starts(PREFIX_COEFFICIENTS).values())


def estimated_us(work: PlanWork, costs: CostModel) -> float:
    """Estimate without a calibration: good for comparing plans of one step."""
    return prefix_physical(_PREFIX_START, work, costs)


def prefix_physical(c, work: PlanWork, costs: CostModel) -> float:
    """Evaluate the formula with coefficients c, as PREFIX_COEFFICIENTS names them."""
    launch, merge, item, partial, part, bandwidth, reread, mma, chain, both, norm = c
    busy = (
        costs.kv_token * bandwidth * (work.tail_tokens + work.shared_tokens)
        + costs.kv_token * reread * work.reread_tokens
        + costs.mma_row * mma * work.shared_rows
    )
    longer = max(work.tail_chain, work.shared_chain)
    shorter = min(work.tail_chain, work.shared_chain)
    busiest = chain * costs.chain * (longer + both * shorter)
    return (
        launch
        + merge * (work.partials > 0)
        + item * costs.num_kv_heads * (work.tail_items + work.shared_items)
        + partial * costs.partial * work.partials
        + part * work.most_parts
        + (busy**norm + busiest**norm) ** (1 / norm)
    )
