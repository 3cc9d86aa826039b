"""Brings the batch's requests to the backend: a ForwardBatch alone does not have them."""

from __future__ import annotations

TARGET = "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new"
WHY = "the radix tree paths of a step are known only through ScheduleBatch.reqs and .tree_cache"
SGLANG = ("0.5.17",)


def hook(forward_batch, cls, batch, model_runner, **kwargs):
    """After ForwardBatch.init_new: tell our backend, if this runner decodes with it."""
    backend = find_backend(model_runner)
    if backend is not None:
        backend.observe(forward_batch, batch)


def find_backend(model_runner):
    """The PrefixAttnBackend that this runner decodes with, or None.

    SGLang wraps a prefill and a decode backend into HybridAttnBackend. Any other wrapper (two-batch
    overlap, hybrid linear attention) is not ours: behind it, steps stay stock.
    """
    from sgl_prefix_attn.backend import PrefixAttnBackend

    if model_runner.is_draft_worker:
        return None
    backend = getattr(model_runner, "attn_backend", None)
    if type(backend).__name__ == "HybridAttnBackend":
        backend = backend.decode_backend
    return backend if isinstance(backend, PrefixAttnBackend) else None


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(TARGET, hook, HookType.AFTER)
