"""The report in words: what was reached beside what is wanted. Nothing is asserted."""

from __future__ import annotations

from eval.markdown import table
from eval.policy_holdout.coverage import title
from eval.policy_holdout.regret import WORST_REGRET, chosen_us, faults, regret
from sgl_prefix_attn.execute.backends.family import ROW_TILES, TRITON

_FAMILIES = {ROW_TILES: "Row tiles", TRITON: "Packs (Triton)"}
WANTED_BATCHES, WANTED_REGRET, WANTED_CALL_US = 200, 1.02, 30


def markdown(summary: dict, meta: dict) -> list[str]:
    """Return the parts of a page: what was judged, all figures, and the choices by kind of sharing.

    meta: of the result file."""
    setup, calibration = meta["setup"], meta["calibration"]
    head = (
        f"{_FAMILIES[setup.get('kernels', TRITON)]}, {setup['heads']} heads, head dim "
        f"{setup['head_dim']}, {setup['dtype']}, page size {setup['page_size']}: "
        f"{setup['batches']} batches of each of the seeds "
        f"{', '.join(map(str, setup['seeds']))}, decided by the {calibration['source']} "
        f"calibration of {calibration['samples']} other batches. Regret is the time of the chosen "
        "kernels over the time of the faster ones."
    )
    if summary["all"] is None:
        return [head, f"All {summary['failed']} batches failed."]
    return [head, _figures(summary), _groups("sharing", summary["sharing"])]


def report(rows: list[dict], summary: dict) -> str:
    """Return what the command prints about measured rows."""
    failing = [row for row in rows if faults(row)]
    parts = []
    if summary["all"] is not None:
        groups = (("seed", "seeds"), ("lengths/sharing", "families"))
        decisions = ", ".join(f"{name} {n}" for name, n in summary["decisions"].items())
        parts = [
            _figures(summary),
            *(_groups(label, summary[name]) for label, name in groups),
            f"decisions: {decisions}",
        ]
    facts = (f"  {_facts(row)}: {'; '.join(faults(row))}" for row in failing)
    parts.append("\n".join([f"failing batches: {len(failing) or 'none'}", *facts]))
    return "\n\n".join([*parts, _coverage(summary["coverage"])])


def numbers(summary: dict) -> list[tuple[str, str, str, str]]:
    """Return lines of (what, over all batches, 95 % confidence interval, wanted).

    The interval of a geometric mean is over seeds, with the mean before it; a share's is over the
    batches that it names."""
    every = summary["all"]
    lines = [
        ("batches measured", str(every["batches"]), "", f"at least {WANTED_BATCHES}"),
        ("batches that failed", str(summary["failed"]), "", "0"),
        ("prefix kernels chosen", str(every["prefix_chosen"]), "", ""),
    ]
    for label, name, form, wanted in (
        ("regret, geometric mean", "regret", "{:.4f}", f"at most {WANTED_REGRET:.2f}"),
        ("regret, worst", "worst", "{:.3f}", f"at most {WORST_REGRET:.2f}"),
        ("share of batches above 1.02", "above_1.02", "{:.1%}", ""),
        ("share of batches above 1.05", "above_1.05", "{:.1%}", ""),
        ("share of batches above 1.10", "above_1.10", "{:.1%}", "none"),
        ("slower than stock by more than 3 % and 2 us", "slower", "{:.3g}", "none"),
        ("unshared, slower by more than 1 % and 1 us", "unshared_slower", "{:.3g}", "none"),
        ("faster than always stock", "over_stock", "{:.3f}x", ""),
        ("faster than always prefix", "over_prefix", "{:.3f}x", ""),
        ("best choice against always stock", "oracle_over_stock", "{:.3f}x", ""),
        ("best choice against always prefix", "oracle_over_prefix", "{:.3f}x", ""),
    ):
        lines.append((label, form.format(every[name]), _interval(summary, name, form), wanted))
    for kernels, quality in summary["prediction"].items():
        at = quality["percentiles"]
        what = f"{kernels}: predicted / measured, rms of logarithms (1 % to 99 %)"
        lines.append((what, f"{quality['rms']:.3f} ({at['p1']:.2f} to {at['p99']:.2f})", "", ""))
    if times := summary.get("policy_us"):
        for label, name, wanted in (
            ("the policy alone", "decide", f"at most {WANTED_CALL_US} us"),
            ("forest, plan, both predictions and the decision", "evaluate", ""),
            ("a step that keeps the last plan", "steady", ""),
            ("reading the paths of a new batch", "walk", ""),
        ):
            what = f"host, {times['batch']} requests: {label}"
            if name in times:  # a file of version 0.1.2 has no time of an evaluation
                lines.append((what, f"{times[name]:.1f} us", "", wanted))
    return lines


def _figures(summary: dict) -> str:
    return table(("", "all batches", "95 % interval", "wanted"), numbers(summary))


def _groups(label: str, groups: dict[str, dict]) -> str:
    columns = (label, "batches", "prefix chosen", "regret", "worst", "faster than always stock")
    rows = (
        (name, entry["batches"], entry["prefix_chosen"], f"{entry['regret']:.4f}",
         f"{entry['worst']:.3f}", f"{entry['over_stock']:.3f}x")
        for name, entry in groups.items()
    )  # fmt: skip
    return table(columns, rows)


def _facts(row: dict) -> str:
    facts = (
        f"{title(row)}: {row['batch_size']} requests of {row['mean_len']:.0f} tokens "
        f"({row['max_len']} at most), {row['shared_share']:.0%} shared, "
    )
    predicted = f"{row['predicted_stock_us']:.1f} / {row['predicted_prefix_us']:.1f} us"
    if row["error"] is not None:
        return facts + f"predicted stock / prefix {predicted}"
    return facts + (
        f"stock / prefix {row['stock_us']:.1f} / {row['prefix_us']:.1f} us, predicted {predicted}, "
        f"{row['variant']} ({row['reason']}), {chosen_us(row):.1f} us, regret {regret(row):.3f}"
    )


def _coverage(found: dict) -> str:
    lines = [
        f"coverage: {found['inside']} batches with 1 to 256 requests, 0 to 95 % shared and 64 to "
        f"64K tokens per request on average, at least {WANTED_BATCHES} wanted; requests of "
        f"{found['shortest']} to {found['longest']} tokens"
    ]
    for field, parts in found["parts"].items():
        lines.append(f"  {field}: " + ", ".join(f"{part}: {n}" for part, n in parts.items()))
    for row in found["outside"]:
        lines.append(
            f"  outside: {row['batch']}: {row['batch_size']} requests, {row['shared_share']:.1%} "
            f"shared, {row['mean_len']:.0f} tokens"
        )
    return "\n".join(lines)


def _interval(summary: dict, name: str, form: str) -> str:
    if name in summary["over_seeds"]:
        entry = summary["over_seeds"][name]
        mean, low, high = (form.format(entry[end]) for end in ("mean", "low", "high"))
        return f"{mean} ({low} to {high})"
    if name in summary["shares"]:
        entry = summary["shares"][name]
        whose = "unshared" if name == "unshared_slower" else "batches"
        return f"{entry['low']:.1%} to {entry['high']:.1%} of {entry['of']} {whose}"
    return ""
