"""Leaves prefill to the backend that SGLang chooses, and drafts to the stock one:
`--attention-backend prefix` means decode."""

from sgl_prefix_attn.engine.start_checks import keep_default_prefill, keep_stock_drafts

TARGET = "sglang.srt.server_args.ServerArgs.resolve_once"
TYPE = "before"
PARAMETERS = ("self",)
WHY = "the backend that serves decode must not change how fast prompts are read"


def hook(server_args, *_args, **_kwargs):
    """Rewrite the arguments before SGLang resolves them; does nothing a second time."""
    keep_default_prefill(server_args)
    keep_stock_drafts(server_args)
