"""Captures each decode batch size twice: SGLang's own stock graph, then one with prefix kernels."""

from sgl_prefix_attn.engine.runner_backend import find_backend

RUNNER = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"
TARGET = f"{RUNNER}.capture_one_shape"
TYPE = "around"
PARAMETERS = ("self", "size", "forward", "stream_idx", "variant_label")
WHY = "a stock step must cost what it costs without the plugin, so both variants need a graph"


def hook(original, runner, size, forward, stream_idx=None, variant_label=None, *rest, **kwargs):
    """Run capture_one_shape unchanged, then again with the backend on prefix kernels.

    Stock comes first: its metadata of this size is then in place if a layer leaves the prefix
    kernels during their capture.
    """

    def capture():
        return original(runner, size, forward, stream_idx, variant_label, *rest, **kwargs)

    result = capture()
    backend = find_graph_backend(runner)
    if backend is None:
        return result
    backend.variants.capture(size, runner.capture_bs, capture, runner.device_module)
    # SGLang captures from the largest size down, "lora" before "nolora".
    if size == min(runner.capture_bs) and variant_label != "lora":
        backend.variants.log_cost()
    return result


def find_graph_backend(runner):
    """Return the backend whose prefix kernels this runner's decode graphs can hold, or None."""
    if runner.enable_pdmux:
        return None
    backend = find_backend(runner.model_runner, runner.attn_backend)
    mode = runner.capture_forward_mode
    return backend if backend is not None and backend.can_capture(mode) else None
