"""A small Llama that SGLang serves like a real one: seeded weights, byte-level BPE tokenizer.

The weights have the scale of trained ones (norms 1, scores with a standard deviation of about 6, so
attention is peaked and dominates the residual): outputs depend on every shared KV entry, unlike
those of `--load-format dummy`.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from eval.model_shapes import LLAMA, SHAPES

_SPECIAL = ("<pad>", "<s>", "</s>")
_CORPUS = (
    "You are a helpful assistant with tools. Answer the question with the result of each call.",
    "Each tool takes arguments and returns text; call one tool at a time and wait for its result.",
    "The quick brown fox jumps over the lazy dog, and many requests share one system prompt.",
    "Decode attention reads the keys and values of a shared prefix once for all of the requests.",
    "user: question number one two three four five six seven eight nine ten. assistant: answer.",
)


def write_tiny_llama(path: str | Path, *, seed: int = 1234, **changes) -> Path:
    """Write config, fp32 weights and tokenizer into `path`; the same arguments, the same bytes.

    changes: entries of config.json other than the tiny shape's; of model_type "qwen3" it is a small
    Qwen3, whose queries and keys are normalised."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = LLAMA | SHAPES["tiny"] | changes | ids
    _write_json(path / "config.json", config)
    _write_json(path / "generation_config.json", ids)
    weights = _weights(config, torch.Generator().manual_seed(seed))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(path, config["vocab_size"], config["max_position_embeddings"])
    return path


def _weights(config: dict, generator: torch.Generator) -> dict[str, torch.Tensor]:
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    q_rows = config["num_attention_heads"] * config["head_dim"]
    kv_rows = config["num_key_value_heads"] * config["head_dim"]

    def linear(rows: int, columns: int, gain: float) -> torch.Tensor:
        """[rows, columns]; `gain` is the output's standard deviation for a unit-variance input."""
        return torch.randn(rows, columns, generator=generator) * (gain / columns**0.5)

    weights = {
        "model.embed_tokens.weight": torch.randn(config["vocab_size"], hidden, generator=generator),
        "lm_head.weight": linear(config["vocab_size"], hidden, 4.8),
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        block = {
            "input_layernorm": torch.ones(hidden),
            "post_attention_layernorm": torch.ones(hidden),
            "self_attn.q_proj": linear(q_rows, hidden, 2.4),
            "self_attn.k_proj": linear(kv_rows, hidden, 2.4),
            "self_attn.v_proj": linear(kv_rows, hidden, 2.4),
            "self_attn.o_proj": linear(hidden, q_rows, 4.8),
            "mlp.gate_proj": linear(intermediate, hidden, 1.0),
            "mlp.up_proj": linear(intermediate, hidden, 1.0),
            "mlp.down_proj": linear(hidden, intermediate, 1.4),
        }
        if config["model_type"] == "qwen3":
            block |= {f"self_attn.{x}_norm": torch.full((config["head_dim"],), 2.4) for x in "qk"}
        weights |= {f"model.layers.{layer}.{name}.weight": w for name, w in block.items()}
    return weights


def _write_tokenizer(path: Path, vocab: int, max_length: int) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(_CORPUS, trainer)
    # So short a text gives fewer merges than `vocab`: pad, so that every id decodes.
    missing = vocab - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"<extra_{i}>" for i in range(missing)])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": _SPECIAL[0],
        "bos_token": _SPECIAL[1], "eos_token": _SPECIAL[2], "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    _write_json(path / "tokenizer_config.json", settings)


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")
