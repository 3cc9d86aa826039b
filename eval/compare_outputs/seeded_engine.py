"""The engines that are compared: a model with seeded weights, the arguments of sglang.Engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

from eval.compare_outputs import faults
from eval.engine_process import (
    EngineError,
    EngineProcess,
    backend_arguments,
    backend_env,
    uses_prefix,
)
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


@contextlib.contextmanager
def judged(
    backend: str,
    page_size: int,
    model: Path,
    folder: Path,
    args,
    plugin: ModuleType,
    env: dict[str, str],
) -> Iterator[EngineProcess]:
    """Run an engine of a backend with an evaluation's plugin and the environment that configures
    it; with the fault that is asked for, if it is a prefix backend.

    Raises EngineError, also for a fault that was never planted.
    """
    fault_log = folder / "fault.log"
    fault = args.fault if uses_prefix(backend) else None
    env = env | forced_env(backend)
    if fault:
        env |= {faults.FAULT_ENV: fault, faults.LOG_ENV: str(fault_log)}
    arguments = engine_arguments(model, args.device, page_size) | backend_arguments(backend)
    if not args.graphs:
        arguments["disable_cuda_graph"] = True
    with EngineProcess(arguments, folder / "engine", plugin=plugin.__name__, env=env) as engine:
        planted = f" with {fault} planted" if fault else ""
        print(f"{backend}{planted}, page size {page_size}: up after {engine.start_s} s", flush=True)
        yield engine
    if fault and not faults.times_planted(fault_log):
        raise EngineError(f"the fault {fault} was never planted")
