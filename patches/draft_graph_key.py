"""Keys the two graphs of a draft model's decode steps apart, as graph_key.py does."""

from sgl_prefix_attn.patches.draft_capture import RUNNER
from sgl_prefix_attn.patches.graph_key import TYPE, hook

__all__ = ["PARAMETERS", "TARGET", "TYPE", "WHY", "hook"]

TARGET = f"{RUNNER}._make_graph_key"
PARAMETERS = ("self", "bs")
WHY = "the graph runner of draft steps makes keys of its own"
