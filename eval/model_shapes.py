"""Configurations of models that the evaluations write themselves; no download.

A name such as llama3.1-70b/tp8 is what one of eight tensor-parallel ranks has of a model: its heads
and its share of the linear layers, without what ranks send each other. One such as
gpt-oss-20b/12-layers has the first of its layers alone, so that two engines fit one GPU.
"""

from __future__ import annotations

import json
from pathlib import Path

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False,
    "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "torch_dtype": "float32",
}  # fmt: skip
# Sizes in this order.
_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "rope_theta",
)  # fmt: skip


# Latent attention, and layers of experts but the first.
_LATENT = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "rms_norm_eps": 1e-6, "first_k_dense_replace": 1, "moe_layer_freq": 1,
}  # fmt: skip
# DeepSeek V3's and Kimi K2's own.
_SIGMOID_EXPERTS = _LATENT | {
    "kind": "deepseek_v3", "q_lora_rank": 1536, "moe_intermediate_size": 2048,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid", "norm_topk_prob": True,
}  # fmt: skip


def _shape(*sizes: float, dtype: str = "bfloat16", kind: str = "", **others) -> dict:
    """kind: the model type, which names the class, too: qwen3_moe is Qwen3MoeForCausalLM."""
    shape = dict(zip(_SIZES, sizes, strict=True)) | {"torch_dtype": dtype} | others
    if kind:
        name = kind.removesuffix("_text").title().replace("_", "")
        shape |= {"architectures": [f"{name}ForCausalLM"], "model_type": kind}
    return shape


def _yarn(factor: float, beta_fast: int, scale: float) -> dict:
    return {
        "type": "yarn", "factor": factor, "original_max_position_embeddings": 4096,
        "beta_fast": beta_fast, "beta_slow": 1, "mscale": scale, "mscale_all_dim": scale,
    }  # fmt: skip


SHAPES = {
    "llama3.1-8b": _shape(4096, 14336, 32, 32, 8, 128, 128256, 131072, 5e5),
    "llama3.2-1b": _shape(2048, 8192, 16, 32, 8, 64, 128256, 131072, 5e5, tie_word_embeddings=True),
    "llama3.1-70b": _shape(8192, 28672, 80, 64, 8, 128, 128256, 131072, 5e5),
    "qwen2.5-7b": _shape(
        3584, 18944, 28, 28, 4, 128, 152064, 131072, 1e6, kind="qwen2", rms_norm_eps=1e-6
    ),
    "qwen3-8b": _shape(
        4096, 12288, 36, 32, 8, 128, 151936, 40960, 1e6, kind="qwen3", rms_norm_eps=1e-6
    ),
    "qwen3-30b-a3b": _shape(
        2048, 6144, 48, 32, 4, 128, 151936, 40960, 1e6, kind="qwen3_moe", rms_norm_eps=1e-6,
        moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, decoder_sparse_step=1,
        norm_topk_prob=True, mlp_only_layers=[],
    ),
    "glm4.5-air": _shape(
        4096, 10944, 46, 96, 8, 128, 151552, 131072, 1e6, kind="glm4_moe", attention_bias=True,
        partial_rotary_factor=0.5, moe_intermediate_size=1408, n_routed_experts=128,
        n_shared_experts=1, num_experts_per_tok=8, first_k_dense_replace=1, n_group=1,
        topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.0,
    ),
    "qwen3-next-80b": _shape(
        2048, 5120, 48, 16, 2, 256, 151936, 262144, 1e7, kind="qwen3_next", rms_norm_eps=1e-6,
        full_attention_interval=4, partial_rotary_factor=0.25, linear_conv_kernel_dim=4,
        linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128,
        linear_value_head_dim=128, num_experts=512, num_experts_per_tok=10, decoder_sparse_step=1,
        moe_intermediate_size=512, shared_expert_intermediate_size=512, norm_topk_prob=True,
    ),
    "qwen3.5-9b": _shape(
        4096, 12288, 32, 16, 4, 256, 248320, 262144, 1e7, rms_norm_eps=1e-6,
        full_attention_interval=4, partial_rotary_factor=0.25, linear_conv_kernel_dim=4,
        linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128,
        linear_value_head_dim=128,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        architectures=["Qwen3_5ForConditionalGeneration"], model_type="qwen3_5",
    ),
    "nemotron-h-8b": _shape(
        4096, 21504, 52, 32, 8, 128, 131072, 131072, 1e4, kind="nemotron_h",
        hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        mlp_hidden_act="relu2", ssm_state_size=128, mamba_num_heads=128, mamba_head_dim=64,
        n_groups=8, conv_kernel=4, chunk_size=128, use_conv_bias=True,
    ),
    "gpt-oss-20b/12-layers": _shape(
        2880, 2880, 12, 64, 8, 64, 201088, 131072, 1.5e5, kind="gpt_oss", attention_bias=True,
        layer_types=6 * ["sliding_attention", "full_attention"], sliding_window=128,
        num_local_experts=32, num_experts_per_tok=4, swiglu_limit=7.0,
        rope_parameters={"rope_type": "default", "rope_theta": 1.5e5},
    ),
    "gemma3-27b/18-layers": _shape(
        5376, 21504, 18, 32, 16, 128, 262208, 131072, 1e6, kind="gemma3_text", rms_norm_eps=1e-6,
        hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=168, sliding_window=1024,
        sliding_window_pattern=6, rope_local_base_freq=10000.0, tie_word_embeddings=True,
    ),
    "deepseek-v2-lite": _shape(
        2048, 10944, 27, 16, 16, 64, 102400, 163840, 1e4, kind="deepseek_v2", **_LATENT,
        q_lora_rank=None, moe_intermediate_size=1408, n_routed_experts=64, n_shared_experts=2,
        num_experts_per_tok=6, n_group=1, topk_group=1, topk_method="greedy",
        scoring_func="softmax", norm_topk_prob=False, routed_scaling_factor=1.0,
        rope_scaling=_yarn(40, 32, 0.707),
    ),
    "deepseek-v3/6-layers": _shape(
        7168, 18432, 6, 128, 128, 64, 129280, 163840, 1e4, **_SIGMOID_EXPERTS,
        n_routed_experts=256, n_group=8, topk_group=4, routed_scaling_factor=2.5,
        rope_scaling=_yarn(40, 32, 1.0),
    ),
    "kimi-k2/5-layers": _shape(
        7168, 18432, 5, 64, 64, 64, 163840, 131072, 5e4, **_SIGMOID_EXPERTS,
        n_routed_experts=384, n_group=1, topk_group=1, routed_scaling_factor=2.827,
        rope_scaling=_yarn(32, 1, 1.0),
    ),
    "tiny": _shape(256, 512, 2, 8, 2, 32, 1024, 8192, 1e4, dtype="float32"),
}  # fmt: skip

_SHARED_OUT = (
    "num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size",
    "shared_expert_intermediate_size", "linear_num_key_heads", "linear_num_value_heads",
)  # fmt: skip


def one_rank(shape: dict, ranks: int) -> dict:
    """Return what one of `ranks` tensor-parallel ranks has of a shape; several have the same KV
    head where there are fewer. Raises ValueError for a size that they cannot share out."""
    part = dict(shape)
    for name in _SHARED_OUT:
        if name == "num_key_value_heads" and ranks % shape[name] == 0:
            part[name] = 1
        elif name in shape:
            part[name], rest = divmod(shape[name], ranks)
            if rest:
                raise ValueError(f"{name} {shape[name]} is no multiple of {ranks}")
    return part


_SLICED = {
    "llama3.1-8b": (4,), "llama3.1-70b": (4, 8), "qwen2.5-7b": (4,), "qwen3-8b": (4,),
    "qwen3-30b-a3b": (4,), "glm4.5-air": (4, 8),
    "qwen3-next-80b": (8,), "deepseek-v3/6-layers": (8,), "kimi-k2/5-layers": (8,),
}  # fmt: skip
SHAPES |= {
    f"{name}/tp{ranks}": one_rank(SHAPES[name], ranks)
    for name, several in _SLICED.items()
    for ranks in several
}
LLAMAS = [name for name, shape in SHAPES.items() if "architectures" not in shape]


def write_config(folder: Path, shape: str, **changes) -> Path:
    """Write config.json of a shape, with changes of its keys, for `--load-format dummy`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = LLAMA | SHAPES[shape] | changes
    if config["model_type"] == "qwen3_5":  # sees, too: what it reads with is one of two
        config["text_config"] = config | {"model_type": "qwen3_5_text"}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return folder
