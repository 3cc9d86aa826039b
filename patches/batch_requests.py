"""Brings the batch's requests to the backend: a ForwardBatch alone does not have them."""

from sgl_prefix_attn.engine.runner_backend import find_backend

TARGET = "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new"
TYPE = "after"
PARAMETERS = ("cls", "batch", "model_runner")
WHY = "the radix tree paths of a step are known only through ScheduleBatch.reqs and .tree_cache"


def hook(forward_batch, cls, batch, model_runner, **kwargs):
    """Tell our backend after ForwardBatch.init_new, if this runner decodes with it."""
    backend = find_backend(model_runner)
    if backend is not None:
        backend.observe(forward_batch, batch)
