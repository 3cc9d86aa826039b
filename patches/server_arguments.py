"""Refuses before the weights are loaded what the backend would refuse after."""

from sgl_prefix_attn.engine import start_checks

TARGET = "sglang.srt.server_args.ServerArgs.check_server_args"
TYPE = "after"
PARAMETERS = ("self",)
WHY = "SGLang builds its backend last: a bad variable would stop the server minutes after its start"


def hook(result, server_args, *_args, **_kwargs):
    """Check settings and model after SGLang's own check, before other processes start."""
    start_checks.check(server_args)
