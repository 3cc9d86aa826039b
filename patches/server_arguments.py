"""Refuses before the weights are loaded what the backend would refuse after."""

from sgl_prefix_attn.engine import start_checks

TARGET = "sglang.srt.server_args.ServerArgs.check_server_args"
TYPE = "around"
PARAMETERS = ("self",)
WHY = "SGLang builds its backend last: a bad variable would stop the server minutes after its start"


def hook(original, server_args, *args, **kwargs):
    """Check settings and model after SGLang's own check, before other processes start."""
    result = original(server_args, *args, **kwargs)
    start_checks.check(server_args)
    return result
