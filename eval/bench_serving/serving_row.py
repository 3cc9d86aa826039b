"""The row of one run: what SGLang's client reports, our counters, the server's log; pure."""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping

from eval.counters import STEPS, Counters, by_labels, prefix_share, total

Figure = Callable[[dict], float | None]
# Latencies of a row, with the client's names for them: of a request's first token, of each later
# token on average, of a request.
LATENCIES = {"ttft_ms": "ttft", "tpot_ms": "tpot", "e2e_ms": "e2e_latency"}
OF_STREAMS = ("ttft_ms", "tpot_ms")  # what only tokens that are sent as they come tell
_FIGURES = {"mean": "mean", "p50": "median", "p99": "p99"}
_LEAST_LINES = 3  # the first, and often the last, tells of prompts' time, too
_BACKENDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
_KV_BYTES = "sglang:prefix_attn_kv_bytes_total"
_PLAN_SECONDS = "sglang:prefix_attn_plan_seconds_total"
# Requests, and tokens/s of the steps since such a line before.
_DECODE_LINE = re.compile(
    r"Decode batch.*#running-req: (\d+),.*gen throughput \(token/s\): ([\d.]+)"
)


def row(
    report: dict, wanted: list[int], grown: Counters, log: str, cpu_seconds: Mapping[str, float]
) -> dict:
    """Return the figures of a run.

    report  the client's result, with details of each request
    wanted  output tokens of each request; one that has another number is not completed
    grown   what the server's counters grew by
    log     what the server wrote meanwhile
    cpu_seconds  that its processes took meanwhile, by name

    Times in ms. `cached_share` is of prompt tokens; `steps` our decode steps by variant and reason,
    {} without the plugin; `kv_bytes` those of decode attention, over all layers; `attention` the
    backends of SGLang's own flags, where it filled in what it picked; `pool_tokens` the KV slots;
    `step_ms` a decode step of as many requests as ran at most, as the server's log tells it.
    """
    cache = report["cache_report"]
    about = report["server_info"] or {}  # a router has none of its servers'
    steps = by_labels(grown, STEPS, "variant", "reason")
    errors = [error for error in report["errors"] if error]
    return {
        "attention": {flag: about.get(flag) for flag in _BACKENDS},
        "pool_tokens": about.get("max_total_num_tokens"),
        "sent": len(wanted),
        # The client may have shuffled the requests: so many of each length.
        "completed": (Counter(report["output_lens"]) & Counter(wanted)).total(),
        "duration_s": report["duration"],
        "input_tokens": report["total_input_tokens"],
        "output_tokens": report["total_output_tokens"],
        "requests_per_s": report["request_throughput"],
        "output_tokens_per_s": report["output_throughput"],
        **{
            name: {ours: report[f"{theirs}_{of}_ms"] for ours, theirs in _FIGURES.items()}
            for name, of in LATENCIES.items()
        },
        "cached_share": cache["total_cached_tokens"] / max(1, cache["total_prompt_tokens"]),
        "peak_running": max(map(int, re.findall(r"#running-req: (\d+)", log)), default=None),
        "step_ms": _step_ms(log),
        "steps": steps,
        "prefix_share": prefix_share(steps),
        "kv_bytes": by_labels(grown, _KV_BYTES, "kind"),
        "planning_s": total(grown, _PLAN_SECONDS),
        "error": errors[0].strip().splitlines()[-1] if errors else None,
        "busy": busy(cpu_seconds, report["duration"]),
    }


def busy(seconds: Mapping[str, float], duration_s: float) -> dict[str, float]:
    """Return the CPU seconds of each process of the server by those of the run: `http`, which has
    one thread for all streams, sets the pace near 1. A scheduler polls, also before and after."""
    return {name: round(taken / duration_s, 2) for name, taken in seconds.items()}


def text(row: dict) -> str:
    """Write a row in one line."""
    parts = [
        f"{row['output_tokens_per_s']:.0f} output tokens/s, {row['requests_per_s']:.2f} requests/s",
        f"request {row['e2e_ms']['p50']:.0f} ms",
        f"cached {row['cached_share']:.0%}, at most {row['peak_running']} running",
        f"{row['duration_s']:.1f} s",
    ]
    if row["tpot_ms"] is not None:
        parts[1:1] = [
            f"TTFT {row['ttft_ms']['p50']:.0f} ms",
            f"TPOT {row['tpot_ms']['p50']:.2f} ms (p99 {row['tpot_ms']['p99']:.2f})",
        ]
    if row["step_ms"] is not None:
        parts.append(f"step {row['step_ms']:.2f} ms")
    if row["prefix_share"] is not None:
        parts.append(f"prefix steps {row['prefix_share']:.0%}")
    if row["busy"]:
        parts.append(f"http busy {row['busy'].get('http', 0):.0%}")
    if row["completed"] < row["sent"]:
        parts.append(f"{row['completed']} of {row['sent']} completed ({row['error']})")
    return ", ".join(parts)


def _step_ms(log: str) -> float | None:
    """Return the median time of the decode steps of as many requests as ran at most; None where too
    few lines of the log tell it. However slowly tokens are streamed, SGLang's scheduler does not
    wait for it."""
    steps = [(int(running), float(rate)) for running, rate in _DECODE_LINE.findall(log)]
    most = max((running for running, _ in steps), default=0)
    found = [1e3 * running / rate for running, rate in steps if running == most and rate]
    return statistics.median(found) if len(found) >= _LEAST_LINES else None


def latency(row: dict, name: str, figure: str) -> float | None:
    """Return a latency of a row in ms, None where answers were not streamed."""
    return row[name] and row[name][figure]


def by_run(rows: list[dict]) -> dict[tuple[str, str], dict[str, list[dict]]]:
    """Return (load, rate) -> backend -> its rows."""
    found: dict = defaultdict(lambda: defaultdict(list))
    for row in rows:
        found[row["load"], row["rate"]][row["backend"]].append(row)
    return found


def median(rows: list[dict], of: Figure) -> float | None:
    """Return the median of a figure of rows, None without one."""
    known = [value for value in map(of, rows) if value is not None]
    return statistics.median(known) if known else None
