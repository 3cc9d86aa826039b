"""CPU platform only: absorbed attention in every batch of a model with a latent KV cache."""

TARGET = "sglang.srt.models.deepseek_v2.DeepseekV2AttentionMLA.dispatch_attn_forward_method"
TYPE = "replace"
PARAMETERS = ("self", "forward_batch")
WHY = "SGLang expands prompts to keys and values of their own, which `torch_native` does not read"


def hook(layer, forward_batch):
    """Return the method that reads the latent cache alone (as dispatch_attn_forward_method)."""
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )

    layer.current_attention_backend = "torch_native"  # which takes queries and keys in one piece
    return AttnForwardMethod.MLA
