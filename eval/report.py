"""python -m eval.report RESULT.json... [--readme README.md] [--check]: tables from result files.

Prints Markdown for kernel, engine, trace and policy results. With --readme it replaces what stands
between `<!-- bench:begin -->` and `<!-- bench:end -->`; with --check it changes nothing and exits
with 1 when the README says anything else than the files.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from eval import provenance
from eval.bench_kernel import summary
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
        body = [_kernel_tables(result["rows"])]
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
    return (
        f"`{name}`: {meta['gpu'] or meta['machine']}{driver}; {versions}; commit {commit}; "
        f"{meta['date']}.\n`{meta['command']}`"
    )


def _kernel_tables(rows: list[dict]) -> str:
    parts = []
    for (heads, head_dim, page_size, dtype), trees in summary.group(rows).items():
        parts.append(
            f"{heads} heads, head dim {head_dim}, {dtype}, page size {page_size}: "
            "microseconds a layer (time / floor)."
        )
        parts.append(_kernel_table(trees))
        parts += _notes(trees)
    return "\n\n".join(parts)


def _kernel_table(trees: dict[str, dict[str, dict]]) -> str:
    names = [
        name
        for name in dict.fromkeys(name for rows in trees.values() for name in rows)
        if any(rows.get(name, {}).get("us") is not None for rows in trees.values())
    ]
    lines = [
        _line("tree", "floor", *names, "best peer / prefix"),
        _line(*["---"] * (len(names) + 3)),
    ]
    for tree, rows in trees.items():
        floor = next(iter(rows.values()))["floor_us"]
        ratio = summary.ratio_to_peer(rows, "prefix")
        cells = [_cell(rows.get(name)) for name in names]
        lines.append(
            _line(f"`{tree}`", f"{floor:.0f}", *cells, "-" if ratio is None else f"{ratio:.2f}")
        )
    by_name = {entry["provider"]: entry for entry in summary.means(trees)}
    for label, field in (("all", "all"), ("with sharing", "sharing")):
        cells = [_mean_cell(by_name.get(name), field) for name in names]
        lines.append(_line(f"geometric mean of time / floor, {label}", "", *cells, ""))
    planning = [_plan_cell(trees, name) for name in names]
    lines.append(_line("host planning of one batch, median", "", *planning, ""))
    if "best stock" in by_name:
        stock = by_name["best stock"]
        lines.append(
            f"\nBest stock peer of each tree: {_mean_cell(stock, 'all')} over the floor, "
            f"{_mean_cell(stock, 'sharing')} with sharing."
        )
    return "\n".join(lines)


def _cell(row: dict | None) -> str:
    if row is None:
        return "-"
    if row["us"] is None:
        return row["status"].partition(":")[0]
    return f"{row['us']:.1f} ({row['us'] / row['floor_us']:.2f})"


def _mean_cell(entry: dict | None, field: str) -> str:
    if entry is None or entry[field] is None:
        return "-"
    return f"{entry[field]:.2f} ({entry['num_' + field]} trees)"


def _plan_cell(trees: dict[str, dict[str, dict]], name: str) -> str:
    times = [rows[name]["plan_us"] for rows in trees.values() if name in rows]
    times = [us for us in times if us is not None]
    return f"{statistics.median(times):.0f} us" if times else "-"


def _notes(trees: dict[str, dict[str, dict]]) -> list[str]:
    """What the table does not show: reasons, eager timings, other page sizes."""
    notes: dict[str, set[str]] = {}
    for rows in trees.values():
        for name, row in rows.items():
            if row["status"] != "ok":
                notes.setdefault(name, set()).add(row["status"])
            if row["timing"] == "eager":
                notes.setdefault(name, set()).add("timed without a CUDA graph")
            if row["run_page_size"]:
                notes.setdefault(name, set()).add(f"run at page size {row['run_page_size']}")
    return (
        ["\n".join(f"- {name}: {'; '.join(sorted(what))}" for name, what in notes.items())]
        if notes
        else []
    )


def _engine_table(rows: list[dict]) -> str:
    """TPOT of each backend on each workload and its ratio to FlashInfer's."""
    backends = list(dict.fromkeys(row["backend"] for row in rows))
    places = list(dict.fromkeys((row["workload"], row["page_size"]) for row in rows))
    by_key = {(row["workload"], row["page_size"], row["backend"]): row for row in rows}
    lines = [
        _line("requests", "shared + private prompt", "page size", *backends),
        _line(*["---"] * (len(backends) + 3)),
    ]
    for workload, page_size in places:
        entries = [by_key.get((workload, page_size, backend)) for backend in backends]
        some = next(entry for entry in entries if entry)
        lines.append(
            _line(
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
    """TTFT and TPOT of each rate and backend against the first backend's."""
    entries = trace_summary.summarise(rows)
    stock = entries[0]["backend"]
    columns = ("TTFT median", "TTFT p99", "TPOT median", "TPOT p99")
    lines = [
        _line("requests/s", "backend", *columns, "completed", "served/s", "sent late, p99"),
        _line(*["---"] * (len(columns) + 5)),
    ]
    for entry in entries:
        lines.append(
            _line(
                f"{entry['rate']:g}",
                entry["backend"],
                *(cell for m in trace_summary.METRICS for cell in trace_summary.cells(entry[m])),
                f"{entry['completed']} of {entry['sent']}",
                f"{entry['achieved_rate']:.2f}",
                f"{entry['late_p99_ms']:.1f} ms",
            )
        )
    return (
        f"`{meta['trace']}`, replayed from an empty cache each time: medians over "
        f"{entries[0]['alternations']} alternations, with their ratio to {stock}'s for medians and "
        f"their place in the range of {stock}'s alternations for p99.\n\n"
    ) + "\n".join(lines)


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
    lines = [_line("", "all batches", "mean over seeds (95 %)", "wanted"), _line(*["---"] * 4)]
    lines += [_line(*cells) for cells in policy_text.numbers(summary)]
    columns = ("batches", "prefix chosen", "regret", "worst", "faster than always stock")
    kinds = [_line("sharing", *columns), _line(*["---"] * (len(columns) + 1))]
    for name, entry in summary["sharing"].items():
        cells = (entry["batches"], entry["prefix_chosen"])
        ratios = (f"{entry['regret']:.4f}", f"{entry['worst']:.3f}", f"{entry['over_stock']:.3f}x")
        kinds.append(_line(name, *map(str, cells), *ratios))
    return [head, "\n".join(lines), "\n".join(kinds)]


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.report", description=__doc__)
    parser.add_argument("results", nargs="+", metavar="RESULT.json")
    parser.add_argument("--readme", help="file whose table is replaced, or checked")
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
