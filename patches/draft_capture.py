"""Captures each batch size of a draft model's decode steps twice, as graph_capture.py does."""

from sgl_prefix_attn.patches.graph_capture import PARAMETERS, TYPE, hook

__all__ = ["PARAMETERS", "RUNNER", "TARGET", "TYPE", "WHY", "hook"]

RUNNER = "sglang.srt.speculative.eagle_draft_cuda_graph_runner.EAGLEDraftCudaGraphRunner"
TARGET = f"{RUNNER}.capture_one_shape"
WHY = "the graph runner of draft steps has a capture of its own"
