"""python -m eval.report RESULT.json... [--readme README.md] [--check]: tables from result files.

Prints Markdown for kernel, engine, trace and policy results. With --readme it replaces what stands
between `<!-- bench:begin -->` and `<!-- bench:end -->`; with --check it changes nothing and exits
with 1 when the README says anything else than the files.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from eval import provenance
from eval.bench_kernel.tables import header, kernel_tables, line
from eval.bench_trace import summary as trace_summary
from eval.policy_holdout import text as policy_text

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"


def markdown(results: list[tuple[str, dict]]) -> str:
    """(file name, result) pairs as Markdown, one section a file. Raises ValueError for a result
    of anything else than kernels, engines, traces and the policy."""
    return "\n\n".join(_section(name, result) for name, result in results) + "\n"


def replace_between(text: str, table: str) -> str:
    """`text` with the part between the markers replaced. Raises ValueError without markers."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"expected {BEGIN} and {END} once each, in this order")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table}{END}{rest.split(END)[1]}"


def _section(name: str, result: dict) -> str:
    first = result["rows"][0]
    if "floor_us" in first:
        body = [kernel_tables(result["rows"])]
    elif "ttft_ms" in first:
        body = [_trace_table(result["rows"], result["meta"])]
    elif "tpot_ms" in first:
        body = [_engine_table(result["rows"])]
    elif "predicted_stock_us" in first:
        body = _policy_tables(result["summary"], result["meta"])
    else:
        raise ValueError(
            f"{name}: its rows are no times of kernels, engines, a trace's requests or the "
            "policy's batches"
        )
    return "\n\n".join([*body, _source(name, result["meta"])])


def _source(name: str, meta: dict) -> str:
    versions = ", ".join(f"{key} {value}" for key, value in meta["versions"].items() if value)
    commit = meta["commit"] + (" with local changes" if meta["dirty"] else "")
    driver = f", driver {meta['driver']}" if meta["driver"] else ""
    peers = "".join(f"; {_peer(*item)}" for item in meta.get("peers", {}).items())
    return (
        f"`{name}`: {meta['gpu'] or meta['machine']}{driver}; {versions}{peers}; commit {commit}; "
        f"{meta['date']}.\n`{meta['command']}`"
    )


def _peer(name: str, sources: dict) -> str:
    """A peer that was run from a folder: its commit, if it has one, and its sources' digest."""
    changed = " with local changes" if sources["dirty"] else ""
    commit = f" {sources['commit'][:12]}{changed}" if sources["commit"] else ""
    return f"{name}{commit} (sources sha256 {sources['sha256'][:12]})"


def _engine_table(rows: list[dict]) -> str:
    """TPOT of each backend on each workload and its ratio to FlashInfer's."""
    backends = list(dict.fromkeys(row["backend"] for row in rows))
    places = list(dict.fromkeys((row["workload"], row["page_size"]) for row in rows))
    by_key = {(row["workload"], row["page_size"], row["backend"]): row for row in rows}
    lines = header("requests", "shared + private prompt", "page size", *backends)
    for workload, page_size in places:
        entries = [by_key.get((workload, page_size, backend)) for backend in backends]
        some = next(entry for entry in entries if entry)
        lines.append(
            line(
                str(some["batch"]),
                f"{some['shared']} + {some['private']}",
                str(page_size),
                *map(_engine_cell, entries),
            )
        )
    return "TPOT, median, and its ratio to FlashInfer's in the same run.\n\n" + "\n".join(lines)


def _engine_cell(row: dict | None) -> str:
    if row is None:
        return "-"
    return f"{row['tpot_ms']:.2f} ms ({row['ratio']:.3f})"


def _trace_table(rows: list[dict], meta: dict) -> str:
    """TTFT and TPOT of each rate and backend, and their ratios to the first backend's."""
    entries = trace_summary.summarise(rows)
    stock = entries[0]["backend"]
    columns = ("TTFT median", "TTFT p99", "TPOT median", "TPOT p99")
    ends = ("prompt cached", "completed", "served/s", "sent late, p99")
    lines = header("requests/s", "backend", *columns, *ends)
    for entry in entries:
        lines.append(
            line(
                f"{entry['rate']:g}",
                entry["backend"],
                *(cell for m in trace_summary.METRICS for cell in trace_summary.cells(entry[m])),
                f"{100 * entry['cached_share']:.1f} %",
                f"{entry['completed']} of {entry['sent']}",
                f"{entry['achieved_rate']:.2f}",
                f"{entry['late_p99_ms']:.1f} ms",
            )
        )
    return (
        f"`{meta['trace']}`, replayed from an empty cache each time: medians over all requests of "
        f"{entries[0]['alternations']} replays; p99 is the median of the replays' own, with its "
        f"place in the range of {stock}'s. {_few_requests(entries)}Prompt cached is the share of "
        "prompt tokens that came from the cache.\n\n"
    ) + "\n".join(lines + _trace_ratios(entries, stock))


def _trace_ratios(entries: list[dict], stock: str) -> list[str]:
    columns = [f"{m} {what}" for m in ("TTFT", "TPOT") for what in ("median", "each", "p99")]
    compared = [entry for entry in entries if entry["ttft_ms"]["ratios"]]
    if not compared:
        return []
    return [
        f"\nRatios to {stock}'s, with 95 % intervals by drawing the replays anew; each is the "
        "median over the requests of each one's own ratio.\n",
        *header("requests/s", "backend", *columns),
        *(
            line(
                f"{entry['rate']:g}",
                entry["backend"],
                *(c for m in trace_summary.METRICS for c in trace_summary.ratio_cells(entry[m])),
            )
            for entry in compared
        ),
    ]


def _few_requests(entries: list[dict]) -> str:
    """What p99 means where a replay has too few requests for it."""
    few = sorted({entry["least_sent"] for entry in entries if entry["least_sent"] <= 100})
    if not few:
        return ""
    return (
        f"A replay has only {' or '.join(map(str, few))} requests: there p99 lies between the two "
        "slowest of them. "
    )


def _policy_tables(summary: dict, meta: dict) -> list[str]:
    """The policy on held-out batches: numbers beside what is wanted, and by kind of sharing."""
    setup, calibration = meta["setup"], meta["calibration"]
    seeds = ", ".join(map(str, setup["seeds"]))
    head = (
        f"{setup['heads']} heads, head dim {setup['head_dim']}, {setup['dtype']}, page size "
        f"{setup['page_size']}: {setup['batches']} batches of each of the seeds {seeds}, judged by "
        f"a {calibration['source']} calibration of {calibration['samples']} other batches. Regret "
        "is the time of the chosen kernels over the time of the faster ones."
    )
    if summary["all"] is None:
        return [head, f"All {summary['failed']} batches failed."]
    lines = header("", "all batches", "95 % interval", "wanted")
    lines += [line(*cells) for cells in policy_text.numbers(summary)]
    columns = ("batches", "prefix chosen", "regret", "worst", "faster than always stock")
    kinds = header("sharing", *columns)
    for name, entry in summary["sharing"].items():
        cells = (entry["batches"], entry["prefix_chosen"])
        ratios = (f"{entry['regret']:.4f}", f"{entry['worst']:.3f}", f"{entry['over_stock']:.3f}x")
        kinds.append(line(name, *map(str, cells), *ratios))
    return [head, "\n".join(lines), "\n".join(kinds)]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.report", description=__doc__)
    parser.add_argument("results", nargs="+", metavar="RESULT.json")
    parser.add_argument("--readme", metavar="PAGE", help="its tables are replaced, or checked")
    parser.add_argument("--check", action="store_true", help="compare only")
    args = parser.parse_args(argv)
    if args.check and not args.readme:
        parser.error("--check needs --readme")
    try:
        results = [(Path(name).name, provenance.load(name)) for name in args.results]
        table = markdown(results)
        if not args.readme:
            print(table, end="")
            return 0
        readme = Path(args.readme)
        old = readme.read_text()
        new = replace_between(old, table)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if args.check:
        if new != old:
            print(f"{readme} is not what the result files say: run without --check")
        return int(new != old)
    readme.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
