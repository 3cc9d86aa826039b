"""The engines that are compared: a model with seeded weights, the arguments of sglang.Engine."""

from __future__ import annotations

from pathlib import Path

import torch

from eval.engine_process import backend_env, uses_prefix
from eval.model_shapes import LLAMA, SHAPES
from eval.tiny_model import write_tiny_llama

SEED = 1234
MAX_RUNNING_REQUESTS = 96
_VOCAB = 32768  # the layers have the shape's size, the embedding need not


def vocab(shape: str) -> int:
    return min(_VOCAB, SHAPES[shape]["vocab_size"])


def write_model(folder: Path, shape: str, layers: int) -> Path:
    changes = {"num_hidden_layers": layers, "vocab_size": vocab(shape)}
    as_tiny = {name: LLAMA[name] for name in ("rope_theta", "torch_dtype")}
    return write_tiny_llama(folder, seed=SEED, **SHAPES[shape] | changes | as_tiny)


def forced_env(backend: str) -> dict[str, str]:
    """Return the environment in which prefix kernels run in every step that can run them: they are
    judged, not the policy. Nothing for a stock backend."""
    if not uses_prefix(backend):
        return {}
    return {"SGL_PREFIX_ATTN_POLICY": "prefix"} | backend_env(backend)


def engine_arguments(model: Path, device: torch.device, page_size: int) -> dict:
    arguments = {
        "model_path": str(model),
        "skip_tokenizer_init": True,
        "page_size": page_size,
        "grammar_backend": "none",
        "sampling_backend": "pytorch",
        "random_seed": 1,
        "skip_server_warmup": True,
        "log_level": "warning",
        "max_running_requests": MAX_RUNNING_REQUESTS,
    }
    if device.type == "cpu":
        return arguments | {"device": "cpu", "dtype": "float32", "max_total_tokens": 16384}
    return arguments | {
        "dtype": "bfloat16",
        "max_total_tokens": 262144,
        "mem_fraction_static": 0.8,
        "cuda_graph_bs_decode": [1, 4, 8, 16, 32, 64, 96],  # every other size is padded
    }
