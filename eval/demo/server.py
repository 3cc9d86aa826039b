"""The demo's servers: one of a tiny model on this machine's GPU, or on its CPU."""

import os
from pathlib import Path

from eval.engine_process import CPU_ENV
from eval.server_process import ServerProcess

CPU_ARGUMENTS = ("--device=cpu", "--dtype=float32", "--max-total-tokens=16384")
GPU_ARGUMENTS = ("--dtype=bfloat16", "--max-total-tokens=65536")


def demo_server(
    model: Path, backend: str, *, gpu: bool, workdir: Path, progress=print
) -> ServerProcess:
    """Make the server of an attention backend; `progress(text)` is told what it waits for."""
    return ServerProcess(
        [
            *("--model-path", str(model.resolve()), "--attention-backend", backend),
            *("--enable-metrics", "--max-running-requests=16", "--random-seed=1"),
            *(GPU_ARGUMENTS if gpu else CPU_ARGUMENTS),
        ],
        log=workdir / f"server-{backend}.log",
        # A model of this size is too small for the policy to choose prefix kernels on a GPU.
        env={"PREFIX_ATTN_POLICY": "prefix", **os.environ, **({} if gpu else CPU_ENV)},
        progress=progress,
    )
