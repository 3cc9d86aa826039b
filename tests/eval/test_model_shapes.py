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
        ("glm4.5-air/tp8", (12, 1)),
    ],
)  # fmt: skip
def test_a_config_is_one_of_its_architecture(tmp_path, shape, heads):
    config = AutoConfig.from_pretrained(write_config(tmp_path, shape))
    assert type(config).__name__ != "PretrainedConfig"
    assert (config.num_attention_heads, config.num_key_value_heads) == heads
    assert config.head_dim == 128 and config.vocab_size == SHAPES[shape]["vocab_size"]


def test_ranks_share_out_heads_and_linear_layers():
    whole, part = SHAPES["qwen3-30b-a3b"], SHAPES["qwen3-30b-a3b/tp4"]
    changed = {name for name in whole if whole[name] != part[name]}
    assert changed == {
        "num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size",
    }  # fmt: skip
    assert part["moe_intermediate_size"] == 192
    with pytest.raises(ValueError, match="num_key_value_heads 4 is no multiple of 8"):
        one_rank(whole, 8)


def test_seeded_weights_are_for_llamas_alone():
    assert {"llama3.1-8b", "llama3.1-70b/tp8", "tiny"} <= set(LLAMAS)
    assert not any(name.startswith(("qwen", "glm")) for name in LLAMAS)
