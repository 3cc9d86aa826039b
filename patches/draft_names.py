"""Gives the backends of a draft model their names."""

from sgl_prefix_attn.engine.shown_backend import name_drafts

TARGET = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"
TYPE = "after"
PARAMETERS = ("self",)
WHY = "models of latent attention ask for the name, and take no name for the server's backend"


def hook(backend, factory, *_args, **_kwargs):
    """Return what _create_backend made."""
    name_drafts(factory, backend)
    return backend
