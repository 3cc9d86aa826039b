"""Refuses before the weights are loaded what the backend would refuse after."""

from __future__ import annotations

from sgl_prefix_attn.engine.model_support import raise_if_unsupported
from sgl_prefix_attn.settings import BACKEND_NAME, Settings

TARGET = "sglang.srt.server_args.ServerArgs.check_server_args"
TYPE = "around"
WHY = "SGLang builds its backend last: a bad variable would stop the server minutes after its start"


def hook(original, server_args):
    """Check settings and model after SGLang's own check, before other processes start."""
    original(server_args)
    if BACKEND_NAME in server_args.get_attention_backends():
        Settings.from_env()  # raises ValueError
        raise_if_unsupported(server_args.get_model_config())
