"""The report in words: what was reached beside what is wanted. Nothing is asserted."""

from __future__ import annotations

from eval.policy_holdout import judgements
from eval.policy_holdout.coverage import title
from eval.policy_holdout.judge import PERCENTILES, WORST_REGRET, chosen_us, faults, regret

WANTED_BATCHES, WANTED_REGRET, WANTED_CALL_US = 200, 1.02, 30


def numbers(summary: dict) -> list[tuple[str, str, str, str]]:
    """(what, over all batches, 95 % confidence interval, wanted).

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
        if name == "worst":
            lines += _history(summary["judgements"])
    for kernels, quality in summary["prediction"].items():
        at = quality["percentiles"]
        lines.append(
            (
                f"{kernels}: predicted / measured, rms of logarithms (1 % to 99 %)",
                f"{quality['rms']:.3f} ({at['p1']:.2f} to {at['p99']:.2f})",
                "",
                "",
            )
        )
    if summary.get("policy_us"):
        times = summary["policy_us"]
        for label, name, wanted in (
            ("the policy alone", "decide", f"at most {WANTED_CALL_US} us"),
            ("predict and decide, without a plan", "look", ""),
            ("a step that goes on with the last look", "steady", ""),
            ("reading the paths of a new batch", "walk", ""),
        ):
            lines.append(
                (f"host, {times['batch']} requests: {label}", f"{times[name]:.1f} us", "", wanted)
            )
    return lines


def lines(rows: list[dict], summary: dict) -> list[str]:
    """The whole report of measured rows."""
    failing = [row for row in rows if faults(row)]
    head = [] if summary["all"] is None else _judged(summary)
    return [
        *head,
        *_notes(summary["judgements"]),
        "",
        f"failing batches: {len(failing) or 'none'}",
        *(f"  {_facts(row)}: {'; '.join(faults(row))}" for row in failing),
        "",
        *_coverage(summary["coverage"]),
    ]


def _judged(summary: dict) -> list[str]:
    result = [f"{'':68} {'all':>22}  {'95 % interval':<28} wanted"]
    result += [
        f"{what:<68} {all_:>22}  {interval:<28} {wanted}"
        for what, all_, interval, wanted in numbers(summary)
    ]
    for title_, groups in (
        ("seed", summary["seeds"]),
        ("lengths/sharing", summary["families"]),
    ):
        result += ["", f"{title_:<24}batches  prefix  regret   worst  slower  over stock"]
        result += [f"{name:<24}{_figures(entry)}" for name, entry in groups.items()]
    decisions = ", ".join(f"{name} {n}" for name, n in summary["decisions"].items())
    result += ["", f"decisions: {decisions}; without a plan: {summary['decided_without_plan']}"]
    for kernels, quality in summary["prediction"].items():
        at = "  ".join(f"{p} %: {quality['percentiles'][f'p{p}']:.3f}" for p in PERCENTILES)
        result.append(f"{kernels} predicted / measured  {at}")
    return result


def _figures(entry: dict) -> str:
    return (
        f"{entry['batches']:7}  {entry['prefix_chosen']:6}  {entry['regret']:.4f}  "
        f"{entry['worst']:6.3f}  {entry['slower'] + entry['unshared_slower']:6}  "
        f"{entry['over_stock']:10.3f}"
    )


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


def _coverage(found: dict) -> list[str]:
    result = [
        f"coverage: {found['inside']} batches with 1 to 256 requests, 0 to 95 % shared and 64 to "
        f"64K tokens a request on average, at least {WANTED_BATCHES} wanted; requests of "
        f"{found['shortest']} to {found['longest']} tokens"
    ]
    for field, parts in found["parts"].items():
        result.append(f"  {field}: " + ", ".join(f"{part}: {n}" for part, n in parts.items()))
    for row in found["outside"]:
        result.append(
            f"  outside: {row['batch']}: {row['batch_size']} requests, {row['shared_share']:.1%} "
            f"shared, {row['mean_len']:.0f} tokens"
        )
    return result


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


def _history(past: list[dict]) -> list[tuple[str, str, str, str]]:
    """A line once the batches were judged more than once: later judgements may rest on earlier."""
    if len(past) < 2:
        return []
    changed = judgements.has_changed(past)
    return [
        (
            f"judged {len(past)} times: worst regret, first and latest",
            f"{past[0]['worst']:.3f}, {past[-1]['worst']:.3f}",
            "calibration changed since the first: seeds no longer unseen" if changed else "",
            "",
        )
    ]


def _notes(past: list[dict]) -> list[str]:
    noted = [entry for entry in past if entry["note"]]
    if not noted:
        return []
    return ["", *(f"judged {e['date']}, commit {e['commit'][:7]}: {e['note']}" for e in noted)]
