"""Finds our backend in a ModelRunner, behind the wrappers that SGLang puts around it.

The hooks load this at plugin registration, and call it in every server, also of other backends:
nothing of SGLang, or of ours that imports it, is imported before prefix attention is asked for.
"""

import sys

from sgl_prefix_attn.engine import sglang_config
from sgl_prefix_attn.settings import BACKEND_NAME

# SGLang's wrappers that are seen through, and what of them decodes full attention. By exact class:
# a derived one may do more than pass batches on.
_WRAPPERS = {
    "HybridAttnBackend": "decode_backend",
    "HybridLinearAttnBackend": "full_attn_backend",
    "ShortConvHybridAttnBackend": "full_attn_backend",
}


def find_backend(model_runner, backend=None):
    """Return the PrefixAttnBackend that this runner decodes with, the PlannedDrafts that a draft
    model's drafts with, or None.

    backend  the one that a graph runner captures with, which need not be the model's own: adaptive
             speculative decoding captures graphs for backends that it changes to later

    SGLang wraps a prefill and a decode backend into HybridAttnBackend, and that, of a model with
    linear attention in some layers, into another. Behind any other wrapper steps stay stock.
    """
    if model_runner.is_draft_worker:
        backend = backend or getattr(model_runner, "draft_attn_backend", None)
        return backend if _is_of(backend, "planned_drafts", "PlannedDrafts") else None
    backend = backend or getattr(model_runner, "attn_backend", None)
    while (inner := _WRAPPERS.get(type(backend).__name__)) is not None:
        backend = getattr(backend, inner)
    return backend if _is_of(backend, "backend", "PrefixAttnBackend") else None


def find_observer(model_runner):
    """Return what is told of this runner's batches: its backend (find_backend), what counts steps
    that are all stock (stock_alone.StockSteps, or a backend that an unknown wrapper hides), or
    None."""
    return find_backend(model_runner) or getattr(model_runner, "prefix_attn_steps", None)


def speculates(model_runner, backends) -> bool:
    """Return whether this runner verifies, or one of the backends of speculative decoding drafts,
    with ours."""
    drafts = (_is_of(backend, "planned_drafts", "PlannedDrafts") for backend in backends)
    return find_backend(model_runner) is not None or any(drafts)


def need_lengths(backends) -> bool:
    """Return whether one of the backends of speculative decoding needs the lengths of the next
    round on the host; None among them is a backend that a server does without."""
    return any(
        getattr(_that_verifies(backend), "needs_cpu_seq_lens", True)
        for backend in backends
        if backend is not None
    )


def _that_verifies(backend):
    """HybridAttnBackend keeps what its backends needed when it was made."""
    if type(backend).__name__ != "HybridAttnBackend":
        return backend
    return backend.decode_backend if backend.spec_attn_is_decode else backend.prefill_backend


def _is_of(backend, module: str, name: str) -> bool:
    """Return whether this is an instance of a class of ours, whose module is loaded then."""
    loaded = sys.modules.get(f"sgl_prefix_attn.engine.{module}")
    return loaded is not None and isinstance(backend, getattr(loaded, name))


def planned_drafts(draft_runner, stock):
    """Return the backend of a draft model's decode steps, `stock` with plans beside it or `stock`
    alone (build_drafts.plan_drafts).

    stock  None where SGLang drafts without decode steps
    """
    args = draft_runner.server_args
    if stock is None or BACKEND_NAME not in sglang_config.attention_backends(args):
        return stock  # a server of other backends need not have our variables right
    from sgl_prefix_attn.engine.build_drafts import plan_drafts

    return plan_drafts(draft_runner, stock)
