"""Which kernels a decode step runs: a pure function of what is known about the batch.

Every tensor-parallel rank sees the same facts and so decides alike; nothing measured at run time
may enter here.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgl_prefix_attn.records import Decision

PREFIX = "prefix"
STOCK = "stock"


@dataclass(frozen=True)
class ModelFacts:
    """What is fixed when the server starts and decides whether prefix kernels can run at all.

    The layer fields say whether any layer of the model has the property.
    """

    head_configs: int  # number of different (query heads, KV heads, head dims) among the layers
    equal_head_dims: bool  # query/key head dim equals value head dim
    sliding_window: bool
    cross_attention: bool
    logit_transform: bool  # capping other than tanh, a temperature, or positions added to logits
    kv_scales: bool
    kv_dtype: str
    model_dtype: str
    device: str
    kv_pool: str  # class name, with its layout when that is not slot-major
    parallel: str | None  # kind of parallelism that is not supported


@dataclass(frozen=True)
class BatchFacts:
    """What decides about one decode step. Reasons are None when there is nothing against it."""

    policy: str = "auto"  # SGL_PREFIX_ATTN_POLICY
    model: str | None = None  # unsupported_model()
    tree: str | None = None  # tree.unsupported_tree()
    graph: str | None = None  # variants.GraphVariants.problem(): no prefix graph of its size
    fault: str | None = None  # what went wrong while this step was planned


def unsupported_model(facts: ModelFacts) -> str | None:
    """Why no step of this model can run the prefix kernels, or None."""
    if facts.head_configs != 1:
        return "layers:different_heads"
    if not facts.equal_head_dims:
        return "layers:head_dim"
    if facts.sliding_window:
        return "layers:sliding_window"
    if facts.cross_attention:
        return "layers:cross_attention"
    if facts.logit_transform:
        return "layers:logit_transform"
    if facts.parallel is not None:
        return f"parallel:{facts.parallel}"
    if facts.model_dtype == "float32" and facts.device != "cpu":
        return "dtype:float32"
    if facts.kv_dtype != facts.model_dtype or facts.kv_scales:
        return f"kv_dtype:{facts.kv_dtype}"
    if facts.kv_pool != "MHATokenToKVPool":
        return f"kv_pool:{facts.kv_pool}"
    return None


def decide(facts: BatchFacts) -> Decision:
    """The step's kernels and why: what is unsupported first, then a forced policy, then what else
    stands against it."""
    unsupported = facts.model or facts.tree
    if unsupported is not None:
        return Decision(STOCK, unsupported)
    if facts.policy == STOCK:
        return Decision(STOCK, "forced")
    against = facts.graph or facts.fault
    if against is not None:
        return Decision(STOCK, against)
    return Decision(PREFIX, "forced" if facts.policy == PREFIX else "default")
