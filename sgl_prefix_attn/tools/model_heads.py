"""The attention heads that a Hugging Face model, or --heads, gives a tensor-parallel rank."""

import argparse
import json
from pathlib import Path
from typing import Any

from sgl_prefix_attn.records import HeadConfig
from sgl_prefix_attn.tools.argument_types import count

HEAD_DIM = 128


class NotSaid(ValueError):
    """A config.json leaves the heads to its model's defaults."""


def add_heads(parser: argparse.ArgumentParser) -> None:
    """Add --model, or --heads and --head-dim, and --tp."""
    heads = parser.add_mutually_exclusive_group()
    heads.add_argument("--model", type=Path, help="folder of a Hugging Face model, or config.json")
    heads.add_argument(
        "--heads", default="32/8", help="query/KV heads of the model (default: 32/8)"
    )
    parser.add_argument(
        "--head-dim", type=count, help=f"of --heads, not with --model (default: {HEAD_DIM})"
    )
    parser.add_argument("--tp", type=count, default=1, help="tensor-parallel size (default: 1)")


def chosen_heads(
    args: argparse.Namespace, takes_latent: bool = False
) -> tuple[dict[str, Any] | None, HeadConfig]:
    """Return the config of --model, None without one, and the heads that these options give a rank.
    Raises ValueError that says what is wrong with them, and for a model of latent attention unless
    the command takes the heads by which that decodes."""
    if args.model is None:
        head_dim = HEAD_DIM if args.head_dim is None else args.head_dim
        named = parse_heads(args.heads)
        try:
            return None, heads_on_rank(*named, head_dim, args.tp)
        except ValueError as error:
            raise ValueError(f"--heads {args.heads}: {error}") from None
    if args.head_dim is not None:
        raise ValueError("--head-dim: a --model has its own")
    config, heads = config_and_heads(args.model, args.tp)
    if config.get("kv_lora_rank") is None:
        return config, heads
    if not takes_latent:
        raise ValueError(
            f"--model: {args.model} has latent attention (kv_lora_rank), which decodes by none of "
            "its heads: this command knows nothing of it. `doctor --model` says what runs it"
        )
    try:
        rank, rope = (size(x, config.get(x)) for x in ("kv_lora_rank", "qk_rope_head_dim"))
    except ValueError as error:
        raise ValueError(f"--model: {args.model}: {error}") from None
    return config, HeadConfig(heads.num_qo_heads, 1, rank + rope, rank)


def config_and_heads(path: Path, tp: int) -> tuple[dict[str, Any], HeadConfig]:
    """Read config.json, or the one in a folder; the config of its language model, and the heads.

    Raises ValueError that names the file and what is wrong with it, NotSaid for a field that is
    missing.
    """
    file, config = _read(path)
    try:
        return config, heads_on_rank(*_heads(config), tp)
    except KeyError as error:
        raise NotSaid(f"--model: {file} has no {error.args[0]}: use --heads") from None
    except ValueError as error:
        raise ValueError(f"--model: {file}: {error}") from None


def _read(path: Path) -> tuple[Path, dict[str, Any]]:
    """Return the file, and in it the config of the language model."""
    file = path / "config.json" if path.is_dir() else path
    try:
        # Not orjson: transformers writes a state-space model's Infinity, which JSON does not know.
        config = json.loads(file.read_bytes())
    except OSError as error:
        raise ValueError(
            f"--model: cannot read {file} ({error.strerror}); it must be a folder with a "
            "config.json, or that file; `explain`, `analyze` and `calibrate` take --heads, too"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--model: {file} is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"--model: {file} is no JSON object")
    if isinstance(config.get("text_config"), dict):
        # a multimodal model's language part; how it is quantized the whole says
        config = {"quantization_config": config.get("quantization_config"), **config["text_config"]}
    return file, _with_defaults(config)


def _with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Fill in what the config of a multimodal model may leave to its language model, as
    transformers does, which must be there and know the model."""
    if all(config.get(name) is not None for name in ("num_attention_heads", "vocab_size")):
        return config
    try:
        from transformers import CONFIG_MAPPING

        return CONFIG_MAPPING[str(config["model_type"])].from_dict(config).to_dict() | config
    except Exception:  # what is missing is named by who needs it
        return config


# As models call them; SGLang looks for these, too.
_KV_HEADS = (
    "num_key_value_heads",
    "n_head_kv",
    "num_kv_heads",
    "multi_query_group_num",
    "num_attention_groups",
)


def _heads(config: dict[str, Any]) -> tuple[int, int, int]:
    """Raises KeyError for a field that is missing, ValueError for one that is no count."""
    num_qo_heads = size("num_attention_heads", config["num_attention_heads"])
    # Without any of these, or with null in it, there is a KV head for every query head.
    named = next((name for name in _KV_HEADS if config.get(name) is not None), None)
    num_kv_heads = num_qo_heads if named is None else size(named, config[named])
    if named is None and config.get("multi_query"):
        num_kv_heads = 1
    if config.get("head_dim") is not None:
        return num_qo_heads, num_kv_heads, size("head_dim", config["head_dim"])
    return num_qo_heads, num_kv_heads, size("hidden_size", config["hidden_size"]) // num_qo_heads


def size(name: str, value: Any) -> int:
    """Return a size that a config has. Raises ValueError that names it where it is none."""
    if type(value) is not int or value < 1:  # True is an int, too
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return value


def parse_heads(text: str) -> tuple[int, int]:
    """Read query and KV heads of `32/8`. Raises ValueError that quotes what does not parse."""
    parts = text.split("/")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise ValueError(f"--heads must be like 32/8, got {text!r}")
    return int(parts[0]), int(parts[1])


def heads_on_rank(num_qo_heads: int, num_kv_heads: int, head_dim: int, tp: int) -> HeadConfig:
    """Divide heads as SGLang does: KV heads are copied where there are fewer than ranks.

    Raises ValueError when they are no heads, naming which, or cannot be divided.
    """
    HeadConfig(num_qo_heads, num_kv_heads, head_dim)  # its checks, before a rank hides a 0
    if num_qo_heads % tp or (num_kv_heads % tp and tp % num_kv_heads):
        raise ValueError(f"{num_qo_heads}/{num_kv_heads} heads cannot be divided by --tp {tp}")
    return HeadConfig(num_qo_heads // tp, max(1, num_kv_heads // tp), head_dim)
