"""Keys the two decode graphs of a batch size apart, at capture and at replay."""

from dataclasses import replace

from sgl_prefix_attn.engine.graph_variants import prefix_label
from sgl_prefix_attn.patches.graph_capture import RUNNER, find_graph_backend

TARGET = f"{RUNNER}._make_graph_key"
TYPE = "around"
PARAMETERS = ("self", "size")
WHY = "SGLang's key of a decode graph has no place for the kernels that attention runs"


def hook(original, runner, *args, **kwargs):
    """Label SGLang's key (_make_graph_key) when this graph holds prefix kernels."""
    key = original(runner, *args, **kwargs)
    backend = find_graph_backend(runner)
    if backend is not None and backend.graph_is_prefix:
        return replace(key, variant_label=prefix_label(key.variant_label))
    return key
