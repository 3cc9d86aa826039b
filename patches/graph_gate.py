"""Sends decode steps that no captured graph holds to the eager path."""

from sgl_prefix_attn.engine.runner_backend import find_backend
from sgl_prefix_attn.patches.graph_capture import RUNNER

TARGET = f"{RUNNER}.can_run_graph"
TYPE = "around"
PARAMETERS = ("self", "forward_batch")
WHY = "a cross-checked step (PREFIX_ATTN_CHECK) runs both backends; a graph holds one"


def hook(original, runner, forward_batch, *args, **kwargs):
    """Answer can_run_graph with no for a step that our backend has to run eagerly."""
    backend = find_backend(runner.model_runner, runner.attn_backend)
    if backend is not None and backend.needs_eager_step:
        return False
    return original(runner, forward_batch, *args, **kwargs)
