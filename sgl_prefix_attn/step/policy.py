"""Which kernels a batch runs: a pure function of what is known about it.

Every tensor-parallel rank sees the same facts and so decides alike; nothing measured at run time
may enter here.
"""

from dataclasses import dataclass

from sgl_prefix_attn.records import PREFIX, STOCK, Decision, Prediction

# A plan is wanted, but has to wait for exact lengths: the next batch has them.
LENGTHS_AWAITED = Decision(STOCK, "lengths_awaited")

# Predicted stock time over prefix time from which prefix kernels run, where KV is shared and where
# none is, by how sure the predictions are. Where nothing is shared a gain is believed later: such
# batches are many, and stock kernels are made for them. Prefix kernels lose little even where they
# are chosen wrongly, so no more has to be promised than that they are as fast, where batches held
# out have judged both times on this GPU (docs/kernel-log.md). A calibration that was not measured
# on such layers, or not on such a GPU, has to promise more.
GAINS = {
    "judged": (1.0, 1.01),
    "measured": (1.025, 1.035),
    "shipped": (1.025, 1.035),
    "scaled": (1.10, 1.15),
    "conservative": (1.30, 1.50),
}
# The same where requests have several tokens each. They take up to 16 % longer than predicted where
# arithmetic bounds tiles of 128 rows (eval/results/multi_token_h200.json).
SEVERAL_GAIN = 1.20
# After a switch the new variant stays this many steps, unless the other is predicted to be faster
# by more than HELD_LOSS: a batch on the border must not flip with every request that comes or goes.
HOLD_STEPS, HELD_LOSS = 32, 1.08
# Stock kernels run any batch, so one that was given to them, or whose plan failed, is evaluated
# again only after so many steps, however it changes meanwhile: that costs the host more than a
# step's bookkeeping.
STOCK_STEPS = 8
# What a plan costs the host, in microseconds. A plan of many decode steps does not feel it, but one
# that serves a single pass of a model, or a round of drafts, has to save as much in all its layers:
# in speculative decoding the GPU waits until the host has read the lengths and planned.
PLAN_US = 300.0


@dataclass(frozen=True)
class BatchFacts:
    """What decides about one batch. Reasons are None when there is nothing against a plan of it.

    predicted  both times, None without a calibration (on a CPU)
    source     of the calibration that predicted them
    shares     whether any KV entry belongs to several requests of the batch
    running    variant of the steps before, None at the start ...
    steps      ... and for how many steps it has run
    least_saving_us  per layer, that prefix kernels must save
    several    whether requests have several new tokens each: nothing is gained then without sharing
    """

    policy: str = "auto"  # PREFIX_ATTN_POLICY
    model: str | None = None  # of the model, the kind of batch, or what only_stock() was told
    tree: str | None = None  # readers.unsupported_tree(), or beams in the batch
    graph: str | None = None  # GraphVariants.problem(): no prefix graph of its size
    predicted: Prediction | None = None
    source: str = "measured"
    shares: bool = True
    running: str | None = None
    steps: int = 0
    least_saving_us: float = 0.0
    several: bool = False


def decide(facts: BatchFacts) -> Decision:
    """Choose the batch's kernels: what is unsupported first, then a forced policy, then what else
    stands against it, then the predicted times."""
    against = facts.model or facts.tree
    if against is None and facts.policy == STOCK:
        against = "forced"
    against = against or facts.graph
    if against is not None:
        return Decision(STOCK, against, facts.predicted)
    if facts.policy == PREFIX:
        return Decision(PREFIX, "forced", facts.predicted)
    if facts.several and not facts.shares:
        return Decision(STOCK, "unshared")
    if facts.predicted is None:
        return Decision(PREFIX, "default")
    gain = facts.predicted.stock_us / facts.predicted.prefix_us
    sharing, unshared = GAINS[facts.source]
    least_gain = sharing if facts.shares else unshared
    if facts.several:
        least_gain = max(SEVERAL_GAIN, sharing)
    faster, reason = _compare(facts.predicted, least_gain, facts.least_saving_us)
    if facts.running not in (None, faster) and facts.steps < HOLD_STEPS:
        loss = gain if faster == PREFIX else 1 / gain
        if loss <= HELD_LOSS:
            faster, reason = facts.running, "held"
    return Decision(faster, reason, facts.predicted)


def _compare(predicted: Prediction, least_gain: float, least_saving_us: float) -> tuple[str, str]:
    """Return the faster variant and the reason; prefix kernels must gain and save so much."""
    if predicted.stock_us < least_gain * predicted.prefix_us:
        return STOCK, "predicted_slower"
    if predicted.stock_us - predicted.prefix_us < least_saving_us:
        return STOCK, "saves_too_little"
    return PREFIX, "predicted_faster"
