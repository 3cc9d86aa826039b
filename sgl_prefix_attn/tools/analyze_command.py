"""`sgl-prefix-attn analyze`: would this load gain, by simulation; needs no GPU."""

from __future__ import annotations

import argparse
from pathlib import Path

from sgl_prefix_attn.tools.argument_types import amount, count
from sgl_prefix_attn.tools.model_heads import add_heads, chosen_heads
from sgl_prefix_attn.tools.named_gpus import GPUS, add_server, server_on
from sgl_prefix_attn.tools.output import progress, text_console

TIME_UNITS = {"milliseconds": 1e-3, "seconds": 1.0}


def add_parser(commands) -> None:
    parser = commands.add_parser("analyze", help="whether a trace's requests would gain")
    parser.add_argument(
        "trace",
        type=Path,
        metavar="TRACE",
        help="JSON lines or a JSON list (Mooncake's, Bailian's, ShareGPT's, SGLang's custom data, "
        "OpenAI's batches, chats, or prompt and output_length), or a server's log with "
        "--log-requests; also of gzip",
    )
    parser.add_argument(
        "--time-unit",
        choices=TIME_UNITS,
        help="of the trace's times (default: milliseconds for timestamp, seconds for arrival and "
        "for Bailian's timestamp)",
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
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read, simulate both servers, print; return exit status 0. Raises ValueError and OSError for
    arguments or a file that cannot be used."""
    # Not before: these import torch and numba.
    from sgl_prefix_attn.tools.analyze import model_costs, summary, trace_file
    from sgl_prefix_attn.tools.analyze.containers import decompressed
    from sgl_prefix_attn.tools.analyze.findings import Findings
    from sgl_prefix_attn.tools.analyze.simulation import simulate
    from sgl_prefix_attn.tools.analyze.trace_lines import Options

    console, gpu = text_console(), GPUS[args.gpu]
    config, heads = chosen_heads(args)
    try:
        model = model_costs.model_of(config, heads, args.tp)
    except ValueError as error:
        raise ValueError(f"--model: {args.model}: {error}") from None
    server = server_on(gpu, heads, args.kernels)
    costs = model_costs.costs(
        model,
        gpu,
        bandwidth=1e6 * server.calibration.bandwidth,
        most_running=args.max_running_requests,
        kv_tokens=args.kv_tokens,
        step=None if args.step_ms is None else args.step_ms / 1e3,
    )
    options = Options(args.words, TIME_UNITS.get(args.time_unit))
    with progress() as bars:

        def simulated(what: str, costs, policy: str):
            task = bars.add_task(f"simulating {what}", total=trace.size)
            return simulate(
                trace, costs, model.layers, server.planner, server.predictor, policy,
                lambda done: bars.update(task, completed=done),
            )  # fmt: skip

        with bars.open(args.trace, "rb", description=f"reading {args.trace}") as file:
            try:
                reading = trace_file.read(decompressed(file), options)
            except ValueError as error:
                raise ValueError(f"{args.trace}: {error}") from None
        trace = reading.trace.at_rate(args.rate) if args.rate else reading.trace
        for line in summary.reading_lines(reading, trace):
            console.print(line, markup=False)
        stock_costs = model_costs.prefilled_by_flashinfer(costs, gpu)
        stock = simulated("FlashInfer", stock_costs, "stock")
        prefix = simulated("the plugin", costs, "auto")
    findings = Findings(stock, prefix, float(trace.arrival[-1]))
    console.print(
        f"simulated: {gpu.name}, {model.layers} layers with {heads.num_qo_heads}/"
        f"{heads.num_kv_heads} heads of {heads.head_dim}, {server.family}, "
        f"calibration {server.calibration.source}; {costs.most_running} requests at most, "
        f"{costs.kv_tokens:,} KV tokens; a decode step takes {1e3 * costs.step:.2f} ms "
        f"+ {1e6 * costs.request:.1f} us a request + attention",
        markup=False,
    )
    console.print("compared with: SGLang with FlashInfer's kernels for decode and prefill", end="")
    console.print(", where Hopper's default is FlashAttention 3\n" if gpu.is_hopper else "\n")
    console.print(summary.render(findings))
    return 0
