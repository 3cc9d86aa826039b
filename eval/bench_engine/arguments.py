"""What bench_engine and bench_trace share: the device, an engine with dummy weights."""

from __future__ import annotations

from pathlib import Path

import torch


def check_device(device: str) -> None:
    """Raises ValueError for "cuda" on a machine without."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"--device cuda: torch {torch.__version__} sees no CUDA GPU here; --device cpu works"
        )


def dummy_engine(
    model: Path, *, device: str, page_size: int, pool_tokens: int, decode_batches: list[int]
) -> dict:
    """sglang.Engine's arguments; `decode_batches` are the captured sizes, their largest the limit
    of running requests."""
    arguments = {
        "model_path": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "page_size": page_size,
        "max_total_tokens": pool_tokens // 64 * 64,
        "max_running_requests": max(decode_batches),
        "grammar_backend": "none",
        "sampling_backend": "pytorch",
        "random_seed": 1,
        "log_level": "warning",
    }
    if device == "cpu":
        return arguments | {"device": "cpu", "dtype": "float32", "skip_server_warmup": True}
    return arguments | {
        # max_total_tokens sets the pool; this only has to leave it room beside other engines.
        "mem_fraction_static": 0.95,
        "cuda_graph_bs_decode": decode_batches,
    }
