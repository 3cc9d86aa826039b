"""python -m eval.report RESULT.json... [--readme README.md] [--check]: tables from result files.

Prints Markdown for kernel, engine, serving, agent, trace and policy results, and for those of the
papers' experiments together. With --readme it replaces what stands between `<!-- bench:begin -->`
and `<!-- bench:end -->`; with --check it changes nothing and exits with 1 when the README says
anything else than the files.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from eval import provenance
from eval.bench_agents import agent_tables
from eval.bench_kernel import kernel_tables
from eval.bench_serving import serving_tables
from eval.bench_trace import trace_tables
from eval.markdown import table
from eval.papers import paper_tables
from eval.policy_holdout import policy_text

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"


def markdown(
    results: list[tuple[str, dict]], baseline: str | None = None, short: bool = False
) -> str:
    """Turn (file name, result) pairs into Markdown, one section per file and one for all files of
    the papers' experiments; `baseline`: of servers' ratios; `short`: of servers and agents the
    main figures. Raises ValueError for a result of anything else than kernels, engines, servers,
    agents, first tokens, traces, the policy and papers."""
    papers = [(name, result) for name, result in results if "experiment" in result["rows"][0]]
    sections = [_section(*pair, baseline, short) for pair in results if pair not in papers]
    if papers:
        rows = paper_tables.merged([result["rows"] for _, result in papers])
        sources = [_source(name, result["meta"]) for name, result in papers]
        sections.append("\n\n".join([paper_tables.markdown(rows), *sources]))
    return "\n\n".join(sections) + "\n"


def replace_between(text: str, tables: str) -> str:
    """Replace the part of `text` between the markers. Raises ValueError without markers."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"expected {BEGIN} and {END} once each, in this order")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{tables}{END}{rest.split(END)[1]}"


def _section(name: str, result: dict, baseline: str | None, short: bool) -> str:
    rows, meta = result["rows"], result["meta"]
    first = rows[0]
    if "run_page_size" in first:
        body = [kernel_tables.markdown(rows)]
    elif "program" in first:
        body = [agent_tables.summary(rows) if short else agent_tables.markdown(rows)]
    elif "e2e_ms" in first and short:
        body = [serving_tables.summary(rows, meta["settings"])]
    elif "e2e_ms" in first:
        body = [serving_tables.markdown(rows, meta["settings"], baseline)]
    elif "group" in first:
        body = [_ttft_table(rows)]
    elif "ttft_ms" in first:
        body = [trace_tables.markdown(rows, meta["trace"])]
    elif "tpot_ms" in first:
        body = [_engine_table(rows)]
    elif "predicted_stock_us" in first:
        body = policy_text.markdown(result["summary"], meta)
    else:
        raise ValueError(
            f"{name}: its rows are no times of kernels, engines, servers, agent programs, a "
            "trace's requests or the policy's batches"
        )
    return "\n\n".join([*body, _source(name, meta)])


def _ttft_table(rows: list[dict]) -> str:
    cells = [
        (row["group"], row["backend"], f"{row['ttft_ms']:.1f} ms", f"{row['ratio']:.3f}")
        for row in rows
    ]
    first = rows[0]
    cached, new = ("{} to {}".format(*first[name]) for name in ("cached", "new"))
    return (
        f"First tokens of all of {first['requests']} requests: {cached} cached tokens that groups "
        f"of them share, {new} new ones.\n\n"
        + table(("group", "prefill/decode", "median", "ratio"), cells)
    )


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
    """Name a peer that was run from a folder by its commit, if any, and its sources' digest."""
    changed = " with local changes" if sources["dirty"] else ""
    commit = f" {sources['commit'][:12]}{changed}" if sources["commit"] else ""
    return f"{name}{commit} (sources sha256 {sources['sha256'][:12]})"


def _engine_table(rows: list[dict]) -> str:
    """Tabulate TPOT of each backend on each workload and its ratio to the baseline's."""
    backends = list(dict.fromkeys(row["backend"] for row in rows))
    places: dict[tuple, dict[str, str]] = {}
    for row in rows:
        prompt = f"{row['shared']} + {row['private']}"
        cells = places.setdefault((row["workload"], row["batch"], prompt, row["page_size"]), {})
        cells[row["backend"]] = f"{row['tpot_ms']:.2f} ms ({row['ratio']:.3f})"
    lines = (
        (*place, *(cells.get(backend, "-") for backend in backends))
        for (_, *place), cells in places.items()
    )
    columns = ("requests", "shared + private prompt", "page size", *backends)
    baseline = next(row["backend"] for row in rows if row["ratio"] == 1)
    head = f"TPOT, median, and its ratio to that of `{baseline}` in the same run.\n\n"
    return head + table(columns, lines)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.report", description=__doc__)
    parser.add_argument("results", nargs="+", metavar="RESULT.json")
    parser.add_argument("--readme", metavar="PAGE", help="its tables are replaced, or checked")
    parser.add_argument("--baseline", help="backend that servers' ratios are to; or each file's")
    parser.add_argument("--short", action="store_true", help="main figures of servers and agents")
    parser.add_argument("--check", action="store_true", help="compare only")
    args = parser.parse_args(argv)
    if args.check and not args.readme:
        parser.error("--check needs --readme")
    try:
        results = [(Path(name).name, provenance.load(name)) for name in args.results]
        tables = markdown(results, args.baseline, args.short)
        if not args.readme:
            print(tables, end="")
            return 0
        readme = Path(args.readme)
        old = readme.read_text()
        new = replace_between(old, tables)
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
