"""Brings the batch's requests to the backend: a ForwardBatch alone does not have them."""

from sgl_prefix_attn.engine.runner_backend import find_observer

TARGET = "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new"
TYPE = "after"
PARAMETERS = ("cls", "batch", "model_runner")
WHY = "the radix tree paths of a step are known only through ScheduleBatch.reqs and .tree_cache"


def hook(forward_batch, cls, batch, model_runner, **kwargs):
    """Tell our backend after ForwardBatch.init_new, if this runner was to decode with it."""
    observer = find_observer(model_runner)
    if observer is not None:
        observer.observe(forward_batch, batch)
