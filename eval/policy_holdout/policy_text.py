"""The report in words: what was reached beside what is wanted. Nothing is asserted."""

from __future__ import annotations

from eval.markdown import table
from eval.policy_holdout.regret import LESS_REGRET, WORST_REGRET, better_fallback, faults

# Of the figures: name, label, how it is printed, what is wanted.
_FIGURES = (
    ("batches", "batches measured", "{}", "at least 200"),
    ("prefix_chosen", "prefix kernels chosen", "{}", ""),
    ("regret", "regret, geometric mean", "{:.4f}", "at most 1.02"),
    ("worst", "regret, worst", "{:.3f}", f"at most {WORST_REGRET:.2f}"),
    ("slower", "slower than stock by more than 3 % and 2 us", "{}", "none"),
    ("unshared_slower", "unshared, slower by more than 1 % and 1 us", "{}", "none"),
    ("over_stock", "faster than always stock", "{:.3f}x", ""),
    ("over_prefix", "faster than always prefix", "{:.3f}x", ""),
)


def markdown(summary: dict, meta: dict) -> list[str]:
    """Return the parts of a page: what was judged, all figures, and the choices by kind of sharing.

    meta: of the result file."""
    setup, calibration = meta["setup"], meta["calibration"]
    head = (
        f"{setup['kernels']} kernels, {setup['heads']} heads, head dim {setup['head_dim']}, "
        f"{setup['dtype']}, page size {setup['page_size']}: {setup['batches']} batches of each of "
        f"the seeds {', '.join(map(str, setup['seeds']))}, decided by the {calibration['source']} "
        f"calibration of {calibration['samples']} other batches. Regret is the time of the chosen "
        "kernels over the time of the fastest ones."
    )
    if summary["all"] is None:
        return [head, f"All {summary['failed']} batches failed."]
    columns = ("sharing", "batches", "prefix chosen", "regret", "worst", "faster than always stock")
    kinds = (
        (name, entry["batches"], entry["prefix_chosen"], f"{entry['regret']:.4f}",
         f"{entry['worst']:.3f}", f"{entry['over_stock']:.3f}x")
        for name, entry in summary["sharing"].items()
    )  # fmt: skip
    page = [head, _figures(summary), table(columns, kinds)]
    if len(fallbacks := summary.get("fallbacks", {})) > 1:
        page.append(_by_fallback(fallbacks))
    return page


def report(rows: list[dict], summary: dict, meta: dict) -> str:
    """Return what the command prints about measured rows."""
    failing = [row for row in rows if faults(row)]
    facts = (
        f"  {row['fallback']}: seed {row['seed']} batch {row['index']} {row['name']}, "
        f"{row['batch_size']} requests of "
        f"{row['mean_len']:.0f} tokens: {'; '.join(faults(row))}"
        for row in failing
    )
    decisions = ", ".join(f"{name} {n}" for name, n in summary["decisions"].items())
    listed = "\n".join([f"failing batches: {len(failing) or 'none'}", *facts])
    return "\n\n".join([*markdown(summary, meta), f"decisions: {decisions}", listed])


def _by_fallback(fallbacks: dict[str, dict]) -> str:
    columns = ("fallback", "regret", "worst", "slower", "unshared, slower", "prefix chosen")
    lines = (
        (name, f"{entry['regret']:.4f}", f"{entry['worst']:.3f}", entry["slower"],
         entry["unshared_slower"], entry["prefix_chosen"])
        for name, entry in fallbacks.items()
    )  # fmt: skip
    rule = f"FlashInfer unless another has less regret by {LESS_REGRET:.0%}"
    verdict = f"The fallback of this GPU ({rule}): {better_fallback(fallbacks)}."
    return f"{table(columns, lines)}\n\n{verdict}"


def _figures(summary: dict) -> str:
    lines = [("batches that failed", str(summary["failed"]), "", "0")]
    for name, label, form, wanted in _FIGURES:
        interval = ""
        if name in summary["over_seeds"]:
            ends = (
                form.format(summary["over_seeds"][name][end]) for end in ("mean", "low", "high")
            )
            interval = "{} ({} to {})".format(*ends)
        lines.append((label, form.format(summary["all"][name]), interval, wanted))
    for kernels, quality in summary["prediction"].items():
        lines.append((f"{kernels}: predicted / measured, rms of logarithms",
                      f"{quality['rms']:.3f}", "", ""))  # fmt: skip
    return table(("", "all batches", "95 % interval over seeds", "wanted"), lines)
