"""How peaked a model's attention is: its entropy, measured by running it."""

from __future__ import annotations

import math
import random
from pathlib import Path

import torch


def attention_entropy(model: Path, length: int, device: str) -> list[float]:
    """Mean entropy [nats] of the last quarter of positions, for each layer; flat attention over
    n positions has log(n)."""
    from transformers import LlamaForCausalLM

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    network = LlamaForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="eager")
    network.to(device).eval()
    rng = random.Random("entropy")
    vocab = network.config.vocab_size
    ids = torch.tensor([[rng.randrange(vocab // 8, vocab) for _ in range(length)]], device=device)
    with torch.no_grad():
        weights = network(ids, output_attentions=True).attentions
    entropies = []
    for layer in weights:
        rows = layer[0, :, -length // 4 :].double()
        entropies.append(float(-torch.xlogy(rows, rows).sum(-1).mean()))
    if device == "cuda":
        del network, weights
        torch.cuda.empty_cache()  # the engines need the memory
    return entropies


def describe(entropies: list[float], length: int) -> str:
    values = ", ".join(f"{value:.2f}" for value in entropies)
    return f"attention entropy by layer: {values} nats (flat attention: {math.log(length):.2f})"
