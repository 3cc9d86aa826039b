"""Lets SGLang choose for a model as it does without the plugin, also where it accepts only backends
that it knows."""

from sgl_prefix_attn.engine.start_checks import not_named_to_the_model

TARGET = "sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments"
TYPE = "around"
PARAMETERS = ("server_args",)
WHY = "a model that no plan can serve is served by what SGLang would have chosen"


def hook(original, server_args, *args, **kwargs):
    """Look at the model without the name of our backend."""
    with not_named_to_the_model(server_args):
        return original(server_args, *args, **kwargs)
