"""The attention heads that a Hugging Face model, or --heads, gives a tensor-parallel rank."""

from pathlib import Path
from typing import Any

import orjson

from sgl_prefix_attn.records import HeadConfig


def heads_of_model(path: Path, tp: int) -> HeadConfig:
    """Reads config.json, or the one in a folder.

    Raises ValueError that names the file and what is wrong with it.
    """
    return config_and_heads(path, tp)[1]


def config_and_heads(path: Path, tp: int) -> tuple[dict[str, Any], HeadConfig]:
    """The same, with the config of the language model."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = orjson.loads(file.read_bytes())
    except OSError as error:
        raise ValueError(
            f"--model: cannot read {file} ({error.strerror}); it must be a folder with a "
            "config.json, or that file: or use --heads and --head-dim"
        ) from None
    except orjson.JSONDecodeError as error:
        raise ValueError(f"--model: {file} is no JSON: {error}") from None
    if isinstance(config, dict) and isinstance(config.get("text_config"), dict):
        config = config["text_config"]  # a multimodal model's language part
    try:
        return config, heads_on_rank(*_heads(config), tp)
    except KeyError as error:
        raise ValueError(f"--model: {file} has no {error.args[0]}: use --heads") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"--model: {file}: {error}") from None


def _heads(config: dict[str, Any]) -> tuple[int, int, int]:
    num_qo_heads = config["num_attention_heads"]
    if num_qo_heads == 0:  # it divides below
        raise ValueError("num_attention_heads must be at least 1, got 0")
    # Without the field, or with null in it, there is a KV head for every query head.
    num_kv_heads = config.get("num_key_value_heads")
    if num_kv_heads is None:
        num_kv_heads = num_qo_heads
    head_dim = config.get("head_dim") or config["hidden_size"] // num_qo_heads
    return num_qo_heads, num_kv_heads, head_dim


def parse_heads(text: str) -> tuple[int, int]:
    """Query and KV heads of `32/8`. Raises ValueError that quotes what does not parse."""
    parts = text.split("/")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise ValueError(f"--heads must be like 32/8, got {text!r}")
    return int(parts[0]), int(parts[1])


def heads_on_rank(num_qo_heads: int, num_kv_heads: int, head_dim: int, tp: int) -> HeadConfig:
    """As SGLang divides them: KV heads are copied where there are fewer than ranks.

    Raises ValueError when they are no heads, naming which, or cannot be divided.
    """
    HeadConfig(num_qo_heads, num_kv_heads, head_dim)  # its checks, before a rank hides a 0
    if num_qo_heads % tp or (num_kv_heads % tp and tp % num_kv_heads):
        raise ValueError(f"{num_qo_heads}/{num_kv_heads} heads cannot be divided by --tp {tp}")
    return HeadConfig(num_qo_heads // tp, max(1, num_kv_heads // tp), head_dim)
