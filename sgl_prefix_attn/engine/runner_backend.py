"""Finds our backend in a ModelRunner, behind the wrappers that SGLang puts around it.

Imports nothing of SGLang until it is called: the hooks load this at plugin registration.
"""


def find_backend(model_runner):
    """Return the PrefixAttnBackend that this runner decodes with, or None.

    SGLang wraps a prefill and a decode backend into HybridAttnBackend. Any other wrapper (two-batch
    overlap, hybrid linear attention) is not ours: behind it, steps stay stock.
    """
    from sgl_prefix_attn.engine.backend import PrefixAttnBackend

    if model_runner.is_draft_worker:
        return None
    backend = getattr(model_runner, "attn_backend", None)
    if backend is not None and type(backend).__name__ == "HybridAttnBackend":
        backend = backend.decode_backend
    return backend if isinstance(backend, PrefixAttnBackend) else None
