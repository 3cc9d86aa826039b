"""Lets the decode steps of a draft model run plans."""

from sgl_prefix_attn.engine.runner_backend import planned_drafts

TARGET = "sglang.srt.speculative.draft_utils.DraftBackendFactory.create_decode_backend"
TYPE = "after"
PARAMETERS = ("self",)
WHY = "SGLang makes the backends of draft steps by names of its own, not from its registry"


def hook(stock, factory, *_args, **_kwargs):
    """Put plans beside what create_decode_backend made, where the draft model allows them."""
    return planned_drafts(factory.draft_model_runner, stock)
