"""Sends a round of draft steps that no graph holds to the eager path, as graph_gate.py does."""

from sgl_prefix_attn.patches.draft_capture import RUNNER
from sgl_prefix_attn.patches.graph_gate import PARAMETERS, TYPE, hook

__all__ = ["PARAMETERS", "TARGET", "TYPE", "WHY", "hook"]

TARGET = f"{RUNNER}.can_run_graph"
WHY = "the graph runner of draft steps admits batches by rules of its own"
