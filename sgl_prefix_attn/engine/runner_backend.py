"""Finds our backend in a ModelRunner, behind the wrappers that SGLang puts around it.

Imports nothing of SGLang until it is called: the hooks load this at plugin registration.
"""


def find_backend(model_runner, backend=None):
    """Return the PrefixAttnBackend that this runner decodes with, the PlannedDrafts that a draft
    model's drafts with, or None.

    backend  the one that a graph runner captures with, which need not be the model's own: adaptive
             speculative decoding captures graphs for backends that it changes to later

    SGLang wraps a prefill and a decode backend into HybridAttnBackend. Any other wrapper (two-batch
    overlap, hybrid linear attention) is not ours: behind it, steps stay stock.
    """
    from sgl_prefix_attn.engine.backend import PrefixAttnBackend
    from sgl_prefix_attn.engine.planned_drafts import PlannedDrafts

    if model_runner.is_draft_worker:
        backend = backend or getattr(model_runner, "draft_attn_backend", None)
        return backend if isinstance(backend, PlannedDrafts) else None
    backend = backend or getattr(model_runner, "attn_backend", None)
    if backend is not None and type(backend).__name__ == "HybridAttnBackend":
        backend = backend.decode_backend
    return backend if isinstance(backend, PrefixAttnBackend) else None


def planned_drafts(draft_runner, topk: int, stock):
    """Return the backend of a draft model's decode steps, `stock` with plans beside it or `stock`
    alone (build_drafts.plan_drafts)."""
    from sgl_prefix_attn.engine.build_drafts import plan_drafts

    return plan_drafts(draft_runner, topk, stock)
