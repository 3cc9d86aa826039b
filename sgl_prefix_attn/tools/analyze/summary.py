"""Findings as text."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from sgl_prefix_attn.tools.analyze.findings import Findings
from sgl_prefix_attn.tools.analyze.simulation import Simulated
from sgl_prefix_attn.tools.analyze.trace import Trace
from sgl_prefix_attn.tools.analyze.trace_file import Reading

PERIODS = 10  # rows of the table over time


def reading_lines(reading: Reading, trace: Trace) -> list[str]:
    """Say what the file held, what of it could not be used and why.

    trace  what is simulated: the file's, or its requests at another rate
    """
    lines = [
        f"{trace.size:,} requests over {trace.arrival[-1]:,.0f} s"
        + ("" if trace.has_arrivals else " (no arrivals: all at once; --rate spreads them)")
        + f"; tokens, mean: prompt {trace.prompt.mean():,.0f}, output {trace.output.mean():,.0f}"
    ]
    if reading.bad:
        lines.append(f"{reading.bad:,} bad lines, left out:")
        lines += [f"  line {number}: {why}" for number, why in reading.problems]
        if reading.bad > len(reading.problems):
            lines.append(f"  and {reading.bad - len(reading.problems):,} more")
    return [*lines, *reading.notes]


def render(findings: Findings) -> Group:
    """Render sharing, times of both servers, the queue and the verdict."""
    return Group(
        _sharing(findings), Text(), _times(findings), Text(), _over_time(findings.prefix), Text(),
        Text("\n".join([*_queue(findings), findings.verdict])),
    )  # fmt: skip


def _sharing(findings: Findings) -> Text:
    prefix = findings.prefix
    return Text(
        f"concurrent reuse {prefix.reuse:.3f}: KV tokens read request by request / unique, over "
        f"{prefix.steps:,} decode steps\n"
        f"KV reads saved: mean {findings.saved_mean:.1%}, p90 {findings.saved_p90:.1%}; "
        f"{findings.prefix_share:.1%} of steps run prefix kernels\n"
        f"prefill takes {prefix.prefill_seconds / prefix.seconds:.0%} of the time; "
        f"{prefix.cached:.1%} of prompt tokens are found in the cache"
    )


def _times(findings: Findings) -> Table:
    table = Table("predicted", "FlashInfer", "prefix", "ratio", box=None, pad_edge=False)

    stock, prefix = findings.stock, findings.prefix
    rows: list[tuple[str, Callable[[Simulated], float], str]] = [
        ("TPOT mean, ms", lambda run: findings.tpot(run, None), ",.2f"),
        ("TPOT p50, ms", lambda run: findings.tpot(run, 0.5), ",.2f"),
        ("TPOT p99, ms", lambda run: findings.tpot(run, 0.99), ",.2f"),
        ("decode step p50, ms", findings.between_tokens, ",.2f"),
        ("TTFT p50, s", lambda run: float(np.nanmedian(run.ttft)), ",.3f"),
        ("output tokens/s", lambda run: run.generated / run.seconds, ",.0f"),
    ]
    for name, value, form in rows:
        ours, theirs = value(prefix), value(stock)
        ratio = f"{ours / theirs:.3f}" if theirs else "-"
        table.add_row(name, format(theirs, form), format(ours, form), ratio)
    return table


def _over_time(run: Simulated) -> Table:
    """Means over equal periods of the simulated time, by decode steps; those that a look stands for
    lie evenly between it and the next one."""
    table = Table("start, s", "running", "waiting", "reuse", "saved", "prefix steps",
                  box=None, pad_edge=False)  # fmt: skip
    names = ("running", "waiting", "tokens", "unique", "saved", "is_prefix")
    columns = np.array([[getattr(look, name) for name in names] for look in run.looks])
    at = np.array([*(look.at for look in run.looks), run.seconds])
    edges = np.linspace(0, run.seconds, PERIODS + 1)
    for begin, end in zip(edges, edges[1:], strict=False):
        shares = np.diff(np.clip(at, begin, end)) / np.diff(at)
        if not shares.any():
            continue
        mean = np.average(columns, axis=0, weights=shares * run.weights)
        running, waiting, tokens, unique, saved, is_prefix = mean
        table.add_row(
            f"{begin:,.1f}", f"{running:.1f}", f"{waiting:.1f}", f"{tokens / unique:.2f}",
            f"{saved:.1%}", f"{is_prefix:.0%}",
        )  # fmt: skip
    return table


def _queue(findings: Findings) -> list[str]:
    stock, lines = findings.stock, []
    if stock.too_long:
        lines.append(f"{stock.too_long:,} requests need more KV than there is room for: left out")
    if findings.is_saturated:
        lines.append(
            f"Saturated: up to {stock.waited:,} requests wait, {findings.left_waiting:,} when the "
            "last one has come, and FlashInfer's server is done "
            f"{stock.seconds - findings.span:,.0f} s later "
            f"({findings.prefix.seconds - findings.span:,.0f} s with the plugin)."
        )
    return lines
