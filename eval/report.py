"""python -m eval.report [RESULT.json...] [--check]: tables from result files.

Of the files that it is given it prints the main figures, as Markdown: of kernels, engines, servers,
routers, agents and the policy, and of the papers' experiments together. Without files it writes the
tables of the pages (eval/pages/blocks.py); with --check it changes nothing and exits with 1 when a
page says anything else than the result files.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from eval import provenance
from eval.bench_agents import agent_tables
from eval.bench_kernel import kernel_tables
from eval.bench_serving import serving_tables
from eval.markdown import table
from eval.pages import blocks, routers
from eval.papers import paper_tables
from eval.policy_holdout import policy_text


def markdown(results: list[tuple[str, dict]]) -> str:
    """Turn (file name, result) pairs into Markdown, one section per file and one for all files of
    the papers' experiments. Raises ValueError for a result of anything else than kernels, engines,
    servers, routers, agents, first tokens, the policy and papers."""
    papers = [(name, result) for name, result in results if "experiment" in result["rows"][0]]
    sections = [_section(*pair) for pair in results if pair not in papers]
    if papers:
        rows = [row for _, result in papers for row in result["rows"]]
        sources = [_source(name, result["meta"]) for name, result in papers]
        sections.append("\n\n".join([paper_tables.markdown(rows), *sources]))
    return "\n\n".join(sections) + "\n"


def _section(name: str, result: dict) -> str:
    rows, meta = result["rows"], result["meta"]
    first = rows[0]
    if "run_page_size" in first:
        body = [kernel_tables.markdown(rows)]
    elif "program" in first:
        body = [agent_tables.markdown(rows)]
    elif "policy" in first:
        body = [routers.of_routers(rows)]
    elif "e2e_ms" in first:
        body = [serving_tables.markdown(rows, meta["settings"])]
    elif "ratio" in first:
        body = [_of_engines(rows)]
    elif "predicted_stock_us" in first:
        body = policy_text.markdown(result["summary"], meta)
    else:
        raise ValueError(
            f"{name}: no figures are printed of {meta['command']}; --help says of what"
        )
    return "\n\n".join([*body, _source(name, meta)])


def _of_engines(rows: list[dict]) -> str:
    """Tabulate the median time of each backend, of a token or of a batch's first tokens, and its
    ratio to the baseline's in the same run."""
    time = "ttft_ms" if "ttft_ms" in rows[0] else "tpot_ms"
    load = "group" if "group" in rows[0] else "workload"
    cells = [(row[load], row["backend"], f"{row[time]:.2f}", f"{row['ratio']:.3f}") for row in rows]
    return table((load, "backend", time, "ratio"), cells)


def _source(name: str, meta: dict) -> str:
    versions = ", ".join(f"{key} {value}" for key, value in meta["versions"].items() if value)
    commit = meta["commit"] + (" with local changes" if meta["dirty"] else "")
    driver = f", driver {meta['driver']}" if meta["driver"] else ""
    return (
        f"`{name}`: {meta['gpu'] or meta['machine']}{driver}; {versions}; commit {commit}; "
        f"{meta['date']}.\n`{meta['command']}`"
    )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.report", description=__doc__)
    parser.add_argument("results", nargs="*", metavar="RESULT.json", help="or none: the pages")
    parser.add_argument("--check", action="store_true", help="compare the pages only")
    args = parser.parse_args(argv)
    if args.results and args.check:
        parser.error("--check is about the pages: it takes no files")
    try:
        if args.results:
            results = [(Path(name).name, provenance.load(name)) for name in args.results]
            print(markdown(results), end="")
            return 0
        stale = blocks.stale()
    except (OSError, ValueError) as error:
        parser.error(str(error))
    except KeyError as error:
        parser.error(f"a row of a result file has no {error}")
    for page, text in stale:
        if args.check:
            print(f"{page} is not what the result files say: run python -m eval.report")
        else:
            page.write_text(text)
    return int(args.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
