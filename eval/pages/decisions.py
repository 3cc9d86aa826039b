"""Tables of the policy and the predictions that it rests on, of the papers, and of the files."""

from __future__ import annotations

import re

from eval.markdown import table
from eval.pages.results import FOLDER, gpu_of, load, page_table, rows, source, span
from eval.papers import paper_tables
from eval.policy_holdout.regret import is_slower, is_unshared_slower
from sgl_prefix_attn.records import FLASHINFER

# Judged batches of each file; those of head dim 256 on an H200 before its calibration are left out.
POLICY = ("policy_h200_fresh", "policy_h200", "policy_h200_64", "policy_h100_row_tiles",
          "policy_h100_fa3",
          "policy_h100_8-1", "policy_h100_16-2", "policy_h100_8-2", "policy_h100_16-8",
          "policy_h100_32-32", "policy_h100_32-8-64", "policy_h100_16-8-256",
          "policy_h100_16-2-256")  # fmt: skip
PAPERS = ("papers_kernels_h200", "papers_ablations_h200", "papers_traces_h200",
          "papers_overhead_h200")  # fmt: skip
SLOWER_THAN_FA3 = 1.03


@page_table(
    "GPU | heads | head dim | batches (seeds) | prefix chosen | regret | worst | slower | "
    "over FlashInfer | FlashInfer's time off by | ours off by",
    *POLICY,
)
def policy():
    """Regret of the decisions on held-out batches, and the predictions' errors there."""
    for name in POLICY:
        meta, summary = load(name)["meta"], load(name)["summary"]
        every, setup = summary["all"], meta["setup"]
        seeds = setup["seeds"]
        errors = (f"{100 * summary['prediction'][of]['rms']:.0f} %" for of in ("stock", "prefix"))
        of_first = (row for row in rows(name) if row.get("fallback", FLASHINFER) == FLASHINFER)
        judged = (row for row in of_first if row["error"] is None)
        slower = sum(is_slower(row) or is_unshared_slower(row) for row in judged)
        yield (gpu_of(name), setup["heads"], setup["head_dim"],
               f"{every['batches']} ({span(seeds, '')})", f"{every['prefix_chosen']}",
               f"{every['regret']:.4f}", f"{every['worst']:.2f}", slower,
               f"{every['over_stock']:.2f}", *errors)  # fmt: skip


def against_fa3() -> str:
    """Batches on which the kernels that the policy picks are slower than FlashAttention 3."""
    by: dict[tuple, dict[str, dict]] = {}
    for row in rows("papers_kernels_h200"):
        if row.get("us"):
            case = (row["experiment"], row["batch"], row["heads"], row["page_size"])
            by.setdefault(case, {})[row["provider"]] = row
    lines, judged = [], 0
    for (_, batch, heads, _), times in by.items():
        if not {"prefix", "flashinfer", "fa3"} <= times.keys():
            continue
        judged += 1
        runs = "prefix" if times["prefix"]["server_runs"] == "prefix" else "flashinfer"
        ratio = times[runs]["us"] / times["fa3"]["us"]
        if ratio > SLOWER_THAN_FA3:
            lines.append((f"`{batch}`", heads, runs, f"{times['fa3']['us']:.1f}",
                          f"{times[runs]['us']:.1f}", f"{ratio:.2f}"))  # fmt: skip
    columns = ("batch", "heads", "picked", "FlashAttention 3, us", "picked, us", "ratio")
    return (
        f"Slower by more than {100 * SLOWER_THAN_FA3 - 100:.0f} %: {len(lines)} of {judged} "
        f"batches.\n\n{table(columns, lines)}\n\n{source('papers_kernels_h200')}"
    )


@page_table("GPU | head dim | heads tried | cuts | error | regret of the cut | file")
def row_tile_rates():
    """Errors of the time model of plans for heads that were left out of its fit."""
    for gpu, head_dim, kind in (("H100", 128, "h100"), ("H200", 128, "h200"),
                                ("H100", 256, "h100_256")):  # fmt: skip
        name = f"row_tile_fit_{kind}"
        found = rows(name)
        cuts = sum(row["samples"] for row in found)
        errors = [row["error of left out"] for row in found]
        regrets = [row["regret of left out"] for row in found]
        yield (gpu, head_dim, len(found), cuts,
               f"{100 * min(errors):.0f} to {100 * max(errors):.0f} %",
               f"{min(regrets):.4f} to {max(regrets):.4f}", f"`{name}.json`")  # fmt: skip


def experiments() -> str:
    """Tabulate each paper's numbers and ours, with the commands and what they leave out."""
    every = [row for name in PAPERS for row in rows(name)]
    return f"{paper_tables.markdown(every)}\n\n{source(*PAPERS)}"


@page_table("file | GPU | SGLang, Triton | commit | date | command")
def index():
    """Where each result file comes from: eval/results/README.md."""
    for path in sorted(FOLDER.glob("*.json")):
        meta = load(path.stem)["meta"]
        versions = [meta["versions"].get(package) or "-" for package in ("sglang", "triton")]
        commit = meta["commit"][:7] + (", local changes" if meta["dirty"] else "")
        yield (f"`{path.name}`", gpu_of(path.stem), ", ".join(versions), commit,
               meta["date"][:10], f"`{shortened(meta['command'], path.name)}`")  # fmt: skip


def shortened(command: str, name: str) -> str:
    """Leave out what the page says of every command: `python -m`, and `--json` with its file."""
    rest = re.sub(rf" --json (\S*/)?{re.escape(name)}(?= |$)", "", command)
    return rest.replace("python -m eval.", "eval.")
