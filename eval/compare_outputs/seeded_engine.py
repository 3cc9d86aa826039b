"""The engines that are compared: arguments of sglang.Engine, and a model with seeded weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from eval import dummy_engine
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


@contextlib.contextmanager
def judged(
    backend: str, page_size: int, model: Path, folder: Path, args, plugin: ModuleType,
    env: dict[str, str],
) -> Iterator[EngineProcess]:  # fmt: skip
    """Run an engine of a backend with an evaluation's plugin and the environment that configures
    it; with the fault that is asked for, if it is a prefix backend.

    Raises EngineError, also for a fault that was never planted.
    """
    fault_log = folder / "fault.log"
    fault = args.fault if uses_prefix(backend) else None
    if uses_prefix(backend):  # kernels are judged, not the policy
        env = env | {"PREFIX_ATTN_POLICY": "prefix"} | backend_env(backend)
    if fault:
        env |= {faults.FAULT_ENV: fault, faults.LOG_ENV: str(fault_log)}
    on_cpu = args.device.type == "cpu"
    arguments = dummy_engine.engine_arguments(
        model, device=args.device, page_size=page_size, pool_tokens=16384 if on_cpu else 262144,
        decode_batches=[1, 4, 8, 16, 32, 64, MAX_RUNNING_REQUESTS],  # every other size is padded
    ) | backend_arguments(backend)  # fmt: skip
    arguments |= {"load_format": "auto", "skip_server_warmup": True}
    if on_cpu:  # whose torch_native knows one pool for all layers, windows or not
        arguments |= {"disable_hybrid_swa_memory": True}
    else:
        arguments |= {"dtype": "bfloat16", "mem_fraction_static": 0.8}
    with EngineProcess(arguments, folder / "engine", plugin=plugin.__name__, env=env) as engine:
        engine.wait_until_up()
        planted = f" with {fault} planted" if fault else ""
        print(f"{backend}{planted}, page size {page_size}: up after {engine.start_s} s", flush=True)
        yield engine
    if fault and not faults.times_planted(fault_log):
        raise EngineError(f"the fault {fault} was never planted")
