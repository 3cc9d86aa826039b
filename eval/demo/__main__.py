"""What `make demo` runs. Exit status 1, with one sentence, if outputs are not the stock backend's:
on a CPU, in float32, to the last token; on a GPU, in bf16, as nearly as another stock backend's.
With --model smollm2 the answers of both are printed.
"""

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console
from transformers import AutoTokenizer

from eval import checkpoints
from eval.checkpoints import SMOLLM2
from eval.cli_values import output
from eval.counters import growth
from eval.demo.comparison import Run, compare, render, render_texts, summarize
from eval.demo.near_ties import Output
from eval.demo.workload import WorkloadError, run_agents, run_chats, run_examples
from eval.engine_process import CPU_ENV, end_on_sigterm
from eval.server_process import ServerError, ServerProcess
from eval.tiny_model import write_tiny_llama

BUILD = Path("build")
CPU_ARGUMENTS = ("--device=cpu", "--dtype=float32", "--max-total-tokens=16384")
GPU_ARGUMENTS = ("--dtype=bfloat16", "--max-total-tokens=65536")
console = Console(highlight=False)


def serve_workload(
    backends: list[str], model: Path, gpu: bool, workload: Callable[[str], list[Output]]
) -> list[Run]:
    """Start a server of each backend, all at once; run the workload, of a server's URL, on one
    after another."""
    with contextlib.ExitStack() as stack:
        start = time.monotonic()
        console.print(f"starting SGLang with --attention-backend {', '.join(backends)} ...")
        servers = {
            backend: stack.enter_context(demo_server(model, backend, gpu=gpu))
            for backend in backends
        }
        for server in servers.values():
            server.wait_until_healthy()
        console.print(f"  healthy after {time.monotonic() - start:.1f} s")
        return [_run(backend, server, workload) for backend, server in servers.items()]


def demo_server(
    model: Path, backend: str, *, gpu: bool, workdir: Path = BUILD / "demo"
) -> ServerProcess:
    """Make the server of an attention backend."""
    return ServerProcess(
        [
            *("--model-path", str(model.resolve()), "--attention-backend", backend),
            *("--enable-metrics", "--max-running-requests=16", "--random-seed=1"),
            *(GPU_ARGUMENTS if gpu else CPU_ARGUMENTS),
        ],
        log=workdir / f"server-{backend}.log",
        # A model of this size is too small for the policy to choose prefix kernels on a GPU.
        env={"PREFIX_ATTN_POLICY": "prefix", **os.environ, **({} if gpu else CPU_ENV)},
    )


def _run(backend: str, server: ServerProcess, workload: Callable[[str], list[Output]]) -> Run:
    before, start = server.counters(), time.monotonic()
    outputs = workload(server.url)
    seconds = time.monotonic() - start
    console.print(f"{backend}: {len(outputs)} outputs in {seconds:.1f} s")
    return Run(backend, outputs, growth(before, server.counters()), seconds)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.demo", description=__doc__)
    parser.add_argument("--backend", default="prefix", help="attention backend under test")
    parser.add_argument("--model", choices=["tiny", "smollm2"], default="tiny")
    parser.add_argument("--output", type=output, default=str(BUILD / "demo.json"))
    args = parser.parse_args(argv)
    end_on_sigterm()
    gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name(0) if gpu else "cpu"

    console.print(f"device: {device}")
    tokenizer, workload = None, run_agents
    try:
        if args.model == "smollm2":
            model = checkpoints.model(SMOLLM2, console.print)
            tokenizer = AutoTokenizer.from_pretrained(model)

            def workload(url: str) -> list[Output]:
                return run_chats(url, tokenizer) + run_examples(url)

        else:
            console.print(f"writing a tiny Llama to {BUILD / 'demo' / 'model'} ...")
            model = write_tiny_llama(BUILD / "demo" / "model", head_dim=64)
        if gpu:
            runs = serve_workload([args.backend, "flashinfer", "triton"], model, gpu, workload)
        else:  # one after another: an idle server, which polls, would keep a core busy
            backends = (args.backend, "torch_native")
            runs = [run for b in backends for run in serve_workload([b], model, gpu, workload)]
    except (ServerError, WorkloadError, checkpoints.ModelError) as error:
        return fail(str(error))

    ours, stock, *noise = runs
    comparison = compare(ours, stock, *noise)
    summary = summarize(ours, stock, comparison, sglang_version=version("sglang"), device=device)
    Path(args.output).write_text(json.dumps(summary, indent=2) + "\n")
    if tokenizer:
        render_texts(ours, stock, tokenizer, console)
    render(summary, console)
    console.print(f"written to {args.output}")
    if comparison.problems:
        return fail("; ".join(comparison.problems))
    return 0


def fail(sentence: str) -> int:
    console.print(f"demo failed: {sentence}", style="bold red", markup=False)
    return 1


if __name__ == "__main__":
    sys.exit(main())
