"""Lets SGLang choose for a model, as model_arguments.py does, until SGLang 0.5.18."""

from sgl_prefix_attn.patches.model_arguments import TYPE, WHY, hook

__all__ = ["PARAMETERS", "TARGET", "TYPE", "WHY", "hook"]

TARGET = "sglang.srt.server_args.ServerArgs._handle_model_specific_adjustments"
PARAMETERS = ("self",)
