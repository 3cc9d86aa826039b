"""`sgl-prefix-attn analyze`: would this load gain, by simulation; needs no GPU."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from sgl_prefix_attn.cli.argument_types import amount, count
from sgl_prefix_attn.cli.exit_status import USAGE
from sgl_prefix_attn.cli.model_heads import add_heads, chosen_heads
from sgl_prefix_attn.cli.named_gpus import GPUS, Server, add_server, server_on
from sgl_prefix_attn.cli.output import add_png, needs_matplotlib


def add_parser(commands) -> None:
    parser = commands.add_parser("analyze", help="whether a trace's requests would gain")
    parser.add_argument(
        "trace",
        type=Path,
        metavar="TRACE",
        help="JSON lines (Mooncake's, SGLang's custom data, or prompt and output_length) or "
        "a log of --log-requests",
    )
    add_server(parser)
    add_heads(parser)
    parser.add_argument(
        "--max-running-requests", type=count, default=256, help="at once (default: 256)"
    )
    parser.add_argument(
        "--kv-tokens", type=count, help="size of the KV pool in tokens (default: what fits)"
    )
    parser.add_argument(
        "--step-ms",
        type=amount,
        help="milliseconds per step outside attention (default: estimated from the weights)",
    )
    parser.add_argument(
        "--words",
        action="store_true",
        help="count each word of text as one token, instead of four characters",
    )
    parser.add_argument(
        "--rate", type=amount, help="requests per second (default: as in the trace)"
    )
    add_png(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit status 0; 2 for arguments or a file that cannot be used."""
    try:
        analyze(args, Console(highlight=False, soft_wrap=True))
        return 0
    except BrokenPipeError:
        raise
    except ValueError as error:
        problem = str(error)
    except OSError as error:
        problem = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    print(f"sgl-prefix-attn analyze: {problem}", file=sys.stderr)
    return USAGE


def analyze(args: argparse.Namespace, console: Console) -> None:
    """Read, simulate both servers, print. Raises ValueError and OSError that say what is wrong."""
    # Not before: these import torch and numba.
    from sgl_prefix_attn.analyze import summary, trace_file
    from sgl_prefix_attn.analyze.findings import Findings
    from sgl_prefix_attn.analyze.model_costs import prefilled_by_flashinfer
    from sgl_prefix_attn.analyze.simulation import simulate

    figures = _figures() if args.png else None
    gpu, model = GPUS[args.gpu], _model(args)
    heads = model.heads
    server = server_on(gpu, heads, args.kernels)
    costs = _costs(args, model, server)
    to_person = sys.stderr.isatty()
    with Progress(transient=True, console=Console(stderr=True), disable=not to_person) as progress:
        with progress.open(args.trace, "rb", description="reading") as lines:
            try:
                reading = trace_file.read(lines, args.words)
            except ValueError as error:
                raise ValueError(f"{args.trace}: {error}") from None
        trace = reading.trace.at_rate(args.rate) if args.rate else reading.trace
        for line in summary.reading_lines(reading, trace):
            console.print(line, markup=False)

        def simulated(policy: str, costs):
            bar = progress.add_task(policy, total=len(trace))
            return simulate(
                trace, costs, model.layers, server.planner, server.predictor, policy,
                lambda done: progress.update(bar, completed=done),
            )  # fmt: skip

        findings = Findings(
            simulated("stock", prefilled_by_flashinfer(costs, gpu.capability)),
            simulated("auto", costs),
            float(trace.arrival[-1]),
        )
    console.print(
        f"simulated: {gpu.name}, {model.layers} layers with {heads.num_qo_heads}/"
        f"{heads.num_kv_heads} heads of {heads.head_dim}, {server.family}, "
        f"calibration {server.calibration.source}; {costs.most_running} requests at most, "
        f"{costs.kv_tokens:,} KV tokens; a decode step takes {1e3 * costs.step:.2f} ms "
        f"+ {1e6 * costs.request:.1f} us a request + attention\n",
        markup=False,
    )
    console.print(summary.render(findings))
    if figures:
        figures.save(figures.draw(findings, model.layers), args.png)
        console.print(f"written: {args.png}", markup=False)


def _model(args: argparse.Namespace):
    from sgl_prefix_attn.analyze.model_costs import llama_8b, model_of

    config, heads = chosen_heads(args)
    if config is None:
        return llama_8b(heads, args.tp)
    try:
        return model_of(config, heads, args.tp)
    except (KeyError, TypeError) as error:
        raise ValueError(f"--model: {args.model}: {error} is missing or no number") from None
    except ValueError as error:
        raise ValueError(f"--model: {args.model}: {error}") from None


def _costs(args: argparse.Namespace, model, server: Server):
    from sgl_prefix_attn.analyze.model_costs import costs

    gpu = GPUS[args.gpu]
    return costs(
        model,
        bandwidth=1e6 * server.calibration.rates.bandwidth,
        flops=gpu.flops,
        memory=gpu.memory,
        most_running=args.max_running_requests,
        kv_tokens=args.kv_tokens,
        step=None if args.step_ms is None else args.step_ms / 1e3,
    )


def _figures():
    with needs_matplotlib():
        from sgl_prefix_attn.analyze import over_time
    return over_time
