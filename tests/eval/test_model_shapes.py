"""Shapes of models: what their configurations say to those who read them."""

import pytest
from transformers import AutoConfig

from eval.model_shapes import LLAMAS, SHAPES, one_rank, write_config


@pytest.mark.parametrize(
    ("shape", "heads"),
    [
        ("llama3.1-8b", (32, 8)), ("llama3.1-8b/tp4", (8, 2)), ("llama3.1-70b", (64, 8)),
        ("llama3.1-70b/tp8", (8, 1)), ("qwen2.5-7b", (28, 4)), ("qwen2.5-7b/tp4", (7, 1)),
        ("qwen3-8b", (32, 8)), ("qwen3-30b-a3b", (32, 4)), ("glm4.5-air", (96, 8)),
        ("glm4.5-air/tp8", (12, 1)), ("gpt-oss-20b/12-layers", (64, 8)),
        ("gemma3-27b/18-layers", (32, 16)), ("nemotron-h-8b", (32, 8)),
        ("deepseek-v2-lite", (16, 16)), ("deepseek-v3/6-layers/tp8", (16, 16)),
        ("kimi-k2/5-layers/tp8", (8, 8)), ("qwen3-next-80b/tp8", (2, 1)), ("qwen3.5-9b", (16, 4)),
    ],
)  # fmt: skip
def test_a_config_is_one_of_its_architecture(tmp_path, shape, heads):
    config = AutoConfig.from_pretrained(write_config(tmp_path, shape)).get_text_config()
    assert type(config).__name__ != "PretrainedConfig"
    assert (config.num_attention_heads, config.num_key_value_heads) == heads
    assert config.head_dim == SHAPES[shape]["head_dim"]
    assert config.vocab_size == SHAPES[shape]["vocab_size"]


@pytest.mark.parametrize(
    ("shape", "layers"),
    [
        ("llama3.1-8b", "0-31 (full attention, 32/8 heads of 128)"),
        (
            "qwen3-next-80b/tp8",
            "3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43, 47 (full attention, 2/1 heads of 256)",
        ),
        ("qwen3.5-9b", "3, 7, 11, 15, 19, 23, 27, 31 (full attention, 16/4 heads of 256)"),
        ("nemotron-h-8b", "7, 18, 29, 40 (full attention, 32/8 heads of 128)"),
        ("gpt-oss-20b/12-layers", "1, 3, 5, 7, 9, 11 (full attention, 64/8 heads of 64)"),
        ("gemma3-27b/18-layers", "5, 11, 17 (full attention, 32/16 heads of 128)"),
        ("deepseek-v2-lite", "0-26 (full attention, 16/1 heads of 576, 512 latent)"),
        ("deepseek-v3/6-layers/tp8", "0-5 (full attention, 16/1 heads of 576, 512 latent)"),
        ("kimi-k2/5-layers/tp8", "0-4 (full attention, 8/1 heads of 576, 512 latent)"),
    ],
)
def test_sglang_reads_the_layers_that_run_plans(tmp_path, shape, layers):
    outlook = pytest.importorskip("sgl_prefix_attn.plugin.model_outlook").outlook
    found = outlook(write_config(tmp_path, shape), 1)
    assert (found.refused, found.stock) == ("", "")
    assert found.layers.startswith(f"layers {layers} run plans")


def test_ranks_share_out_heads_and_linear_layers():
    whole, part = SHAPES["qwen3-30b-a3b"], SHAPES["qwen3-30b-a3b/tp4"]
    changed = {name for name in whole if whole[name] != part[name]}
    assert changed == {
        "num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size",
    }  # fmt: skip
    assert part["moe_intermediate_size"] == 192
    assert one_rank(whole, 8)["num_key_value_heads"] == 1
    with pytest.raises(ValueError, match="num_attention_heads 32 is no multiple of 5"):
        one_rank(whole, 5)


def test_seeded_weights_are_for_llamas_alone():
    assert {"llama3.1-8b", "llama3.1-70b/tp8", "tiny"} <= set(LLAMAS)
    assert not any(name.startswith(("qwen", "glm")) for name in LLAMAS)
