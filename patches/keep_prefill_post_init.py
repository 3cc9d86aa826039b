"""Leaves prefill to SGLang's choice, as keep_prefill.py does, until SGLang 0.5.18: arguments are
resolved while they are constructed."""

from sgl_prefix_attn.patches.keep_prefill import PARAMETERS, TYPE, WHY, hook

__all__ = ["PARAMETERS", "TARGET", "TYPE", "WHY", "hook"]

TARGET = "sglang.srt.server_args.ServerArgs.__post_init__"
