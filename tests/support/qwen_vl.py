"""Tiny Qwen2.5-VL and Qwen3-VL with seeded weights, and images for them."""

import base64
import io
import json
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from eval.tiny_model import write_tiny_llama

VISION_START, VISION_END, IMAGE, VIDEO = 1000, 1001, 1002, 1003
_SIDE = 84  # pixels of an image, which are three patches of 28, or of 32: a token each
IMAGE_TOKENS = 9
_TEXT = {
    "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e4},
}  # fmt: skip
_VISION = {
    "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4,
    "spatial_merge_size": 2, "out_hidden_size": 256,
}  # fmt: skip


class _Family(NamedTuple):
    config: Any
    model: Any
    processor: str
    vision: dict
    text: dict


FAMILIES = {
    "qwen2_5_vl": _Family(
        Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, "Qwen2_5_VLProcessor",
        {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}, {},
    ),
    # What its vision layers see is added to the first layers of the text, too.
    "qwen3_vl": _Family(
        Qwen3VLConfig, Qwen3VLForConditionalGeneration, "Qwen3VLProcessor",
        {"patch_size": 16, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64},
        {"head_dim": 32},
    ),
}  # fmt: skip


def write_model(path, family, **text):
    """Write config, fp32 weights, tokenizer and image processor; `text`: changes of its language
    model. Weights have the scale of trained ones, as those of eval.tiny_model have: outputs depend
    on all KV, and on the images."""
    write_tiny_llama(path)  # its tokenizer; the ids of images are among those without a text
    _name_tokens(path)
    made = FAMILIES[family]
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = made.config(
        text_config=_TEXT | made.text | text | tokens, vision_config=_VISION | made.vision,
        image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END, tie_word_embeddings=False, **tokens,
    )  # fmt: skip
    torch.manual_seed(3)
    model = made.model(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                fan = weight[0].numel()
                weight.normal_(std=_gain(name, fan) / fan**0.5)
            elif "q_norm" in name or "k_norm" in name:  # behind which projections' scale is gone
                weight.fill_(2.4)
    model.save_pretrained(path)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor", "processor_class": made.processor,
        "patch_size": made.vision["patch_size"], "temporal_patch_size": 2, "merge_size": 2,
        "min_pixels": 56 * 56, "max_pixels": 112 * 112, "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }  # fmt: skip
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    return path


def image(seed):
    """Draw a square of random blocks, as a data URL of a PNG."""
    blocks = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    pixels = blocks.repeat(_SIDE // 6, axis=0).repeat(_SIDE // 6, axis=1)
    png = io.BytesIO()
    Image.fromarray(pixels).save(png, "PNG")
    return "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()


def _gain(name, fan):
    if "embed_tokens" in name:
        return fan**0.5
    gains = {"lm_head": 4.8, "q_proj": 2.4, "k_proj": 2.4, "v_proj": 2.4, "o_proj": 4.8}
    return next((gain for part, gain in gains.items() if part in name), 1.4)


def _name_tokens(path):
    """Give the ids of images the words that SGLang and the processor look for."""
    names = {
        VISION_START: "<|vision_start|>", VISION_END: "<|vision_end|>",
        IMAGE: "<|image_pad|>", VIDEO: "<|video_pad|>",
    }  # fmt: skip
    file = path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    for token in tokenizer["added_tokens"]:
        if token["id"] in names:
            token["content"], token["special"] = names[token["id"]], True
    file.write_text(json.dumps(tokenizer))
