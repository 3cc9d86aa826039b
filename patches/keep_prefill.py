"""Leaves prefill to the backend that SGLang chooses, and drafts to the stock one:
`--attention-backend prefix` means decode."""

from sgl_prefix_attn.engine.start_checks import ask_for_decode, give_prefill, keep_stock_drafts

TARGET = "sglang.srt.server_args.ServerArgs.resolve_once"
TYPE = "around"
PARAMETERS = ("self",)
WHY = "the backend that serves decode must not change how fast prompts are read"


def hook(original, server_args, *args, **kwargs):
    """Rewrite the arguments before SGLang resolves them; a second time changes nothing."""
    keep_stock_drafts(server_args)
    prefill = ask_for_decode(server_args)
    result = original(server_args, *args, **kwargs)
    if prefill:
        give_prefill(server_args)
    return result
