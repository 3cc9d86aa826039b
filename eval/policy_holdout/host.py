"""What the policy costs a decode step on the host, in microseconds."""

from __future__ import annotations

import numpy as np

from eval import bench_plan
from sgl_prefix_attn.paths.radix_reader import RadixReader
from sgl_prefix_attn.paths.tree_reader import RunningBatch
from sgl_prefix_attn.plan import Planner
from sgl_prefix_attn.plan.row_tile_planner import RowTilePlanner
from sgl_prefix_attn.predict.predictor import Predictor
from sgl_prefix_attn.records import Decision
from sgl_prefix_attn.step.evaluate import evaluate
from sgl_prefix_attn.step.policy import BatchFacts, decide

BATCH, _LEVELS = 256, 4
_CALLS, _STEPS = 1001, 51


def policy_us(
    predictor: Predictor, planner: Planner | RowTilePlanner, calls: int = _CALLS
) -> dict[str, float]:
    """Measure medians for BATCH requests below a tree of several levels:

    decide    the policy alone
    evaluate  forest, plan, both predictions and the decision
    walk      read the paths that an evaluation starts from
    steady    a whole step that keeps the last plan
    """
    tree = bench_plan.tree_of(BATCH, _LEVELS)
    reqs = bench_plan.fake_requests(tree)
    cache = bench_plan.RadixCache()
    seq_lens = np.full(BATCH, tree.seq_len + 100)
    paths = RadixReader().read_paths(RunningBatch(reqs, cache, seq_lens, None))

    def evaluation() -> Decision:
        return evaluate(paths, BatchFacts(), planner, predictor).decision

    facts = BatchFacts(predicted=evaluation().predicted)
    steps = bench_plan.measure(BATCH, _LEVELS, planner, _STEPS)
    own = {
        "decide": bench_plan.median_ms(lambda: decide(facts), calls),
        "evaluate": bench_plan.median_ms(evaluation, _STEPS),
    }
    times = own | {name: steps[name] for name in ("walk", "steady")}
    return {"batch": BATCH} | {name: 1e3 * ms for name, ms in times.items()}
