"""Small models of other kinds than Llama, with weights that make outputs depend on all KV."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from eval.tiny_model import write_tiny_llama


def write_tiny_olmo3(path: Path, layer_types: list[str]) -> Path:
    """Write an Olmo 3, which normalises behind its sublayers; windows are of 32 tokens."""
    write_tiny_llama(
        path,
        model_type="olmo3",
        rope_scaling={"rope_type": "default", "rope_theta": 10000.0},  # 0.5.17 reads no other name
        architectures=["Olmo3ForCausalLM"],
        sliding_window=32,
        layer_types=layer_types,
        num_hidden_layers=len(layer_types),
    )
    config = json.loads((path / "config.json").read_text())
    heads, kv_heads = (config[f"num_{x}_heads"] for x in ("attention", "key_value"))
    weights = {
        name.replace("input_layernorm", "post_feedforward_layernorm"): weight
        for name, weight in load_file(path / "model.safetensors").items()
    }
    for layer in range(config["num_hidden_layers"]):
        for name, count in (("q", heads), ("k", kv_heads)):
            norm = f"model.layers.{layer}.self_attn.{name}_norm.weight"
            weights[norm] = torch.full((count * config["head_dim"],), 1.5)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


_TINY = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 4,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
# Multi-head latent attention, in layers without experts.
_DEEPSEEK = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "head_dim": 16,
    "first_k_dense_replace": 4,
}
_WINDOWS = ["sliding_attention", "full_attention"] * 2
KINDS = {
    # three layers of a gated delta rule, then one of full attention
    "qwen3_next": {
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 8,  # for fewer SGLang splits projections in a kernel
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
    },
    "lfm2": {
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "block_auto_adjust_ff_dim": False,
        "block_ff_dim": 256,
    },
    "mellum": {
        "sliding_window": 32,
        "layer_types": _WINDOWS,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
    },
    "gemma3_text": {
        "sliding_window": 32,
        "layer_types": _WINDOWS,
        "query_pre_attn_scalar": 32,
        "tie_word_embeddings": True,  # SGLang loads no other head
    },
    "deepseek_v2": _DEEPSEEK | {"q_lora_rank": None},
    "deepseek_v3": _DEEPSEEK | {"q_lora_rank": 64, "rope_interleave": True},
    # with sinks in all layers
    "gpt_oss": {
        "sliding_window": 32,
        "layer_types": _WINDOWS,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
# What released configs say, SGLang reads and this transformers does not write.
_YARN = {"factor": 4.0, "original_max_position_embeddings": 1024, "beta_fast": 32, "beta_slow": 1}
# SGLang has no other rotary embedding for latent attention on a CPU
_LATENT = {
    "rope_scaling": {"type": "yarn", "mscale": 0.7, "mscale_all_dim": 0.7, **_YARN},
    "moe_layer_freq": 1,
}
_RELEASED = {
    "qwen3_next": {"full_attention_interval": 4},
    "gpt_oss": {"swiglu_limit": 7.0},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
}


def write_tiny(path: Path, kind: str, dtype: torch.dtype = torch.float32, **changes) -> Path:
    """Write a model of one of KINDS, as transformers writes it; `changes` are to its config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    write_tiny_llama(path)  # for the tokenizer
    config = AutoConfig.for_model(kind, **_TINY | KINDS[kind] | changes)
    with torch.random.fork_rng():
        torch.manual_seed(0)  # of what is left as it is made
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    # before a model scales it, as Gemma does
    embedding = 1 / float(getattr(model.get_input_embeddings(), "embed_scale", 1.0))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                scale = _scale(name, weight, embedding)
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
            elif any(part in name for part in ("q_norm", "k_norm", "q_layernorm", "k_layernorm")):
                weight += 1.4  # some of these scale by one more than the weight
            elif embedding < 1 and "post_attention_layernorm" in name:
                weight += 2  # else the head, which is the embedding, repeats the last token
            elif "sinks" in name:  # as high as scores are
                weight.copy_(torch.randn(weight.shape, generator=generator) + 2)
    model.save_pretrained(path)
    config_file = path / "config.json"
    config = json.loads(config_file.read_text()) | _RELEASED.get(kind, {}) | changes
    config_file.write_text(json.dumps(config))
    return path


def _scale(name: str, weight: torch.Tensor, embedding: float) -> float:
    """Return the standard deviation of a matrix's entries: that of write_tiny_llama's."""
    if "embed" in name:
        return embedding
    gains = {"lm_head": 4.8, "q_proj": 2.4, "k_proj": 2.4, "o_proj": 4.0, "out_proj": 4.0}
    gain = next((gain for part, gain in gains.items() if part in name), 1.5)
    return gain / weight.shape[-1] ** 0.5
