"""LoRA adapters with seeded weights, and SGLang's LoRA without a GPU."""

import json

import torch
from safetensors.torch import save_file

ADAPTERS = ("one", "other")


def write_adapters(folder, config):
    """Write ADAPTERS for a Llama's config; returns their paths by name."""
    folder.mkdir()
    return {n: str(_write(folder / n, config, seed=5 + i)) for i, n in enumerate(ADAPTERS)}


def _write(path, config, seed):
    """Write an adapter of rank 8 on the query and value projections."""
    path.mkdir()
    generator = torch.Generator().manual_seed(seed)
    (path / "adapter_config.json").write_text(
        json.dumps(
            {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none",
             "target_modules": ["q_proj", "v_proj"]}
        )
    )  # fmt: skip
    heads = {"q_proj": config["num_attention_heads"], "v_proj": config["num_key_value_heads"]}
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, count in heads.items():
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            a = torch.randn(8, config["hidden_size"], generator=generator) * 0.03
            b = torch.randn(count * config["head_dim"], 8, generator=generator) * 0.1
            weights |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
    save_file(weights, path / "adapter_model.safetensors", metadata={"format": "pt"})
    return path


def unpin() -> None:
    """Let torch take host memory that is not pinned where SGLang's LoRA layers ask for pinned one,
    which torch has on machines with an accelerator alone."""

    def without(make):
        return lambda *args, pin_memory=False, **options: make(*args, **options)

    torch.tensor, torch.zeros = without(torch.tensor), without(torch.zeros)
    torch.Tensor.pin_memory = lambda self: self
