"""From two runs of the workload to the demo's table and build/demo.json."""

from dataclasses import dataclass
from itertools import takewhile, zip_longest

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from eval.counters import KV_TOKENS, STEPS, Counters, by_labels, total
from eval.demo import near_ties
from eval.demo.near_ties import Output

_PLANS = "sglang:prefix_attn_plans_total"


@dataclass(frozen=True)
class Run:
    """One server run: outputs, what its counters grew by, wall seconds of the workload."""

    backend: str
    outputs: list[Output]
    counters: Counters
    seconds: float


def differences(ours: Run, stock: Run) -> list[str]:
    """Return a line for each request whose tokens differ: which one, and from which token on."""
    got = {output.name: output.token_ids for output in ours.outputs}
    want = {output.name: output.token_ids for output in stock.outputs}
    lines = []
    for name in sorted(got.keys() | want.keys()):
        mine, its = got.get(name, ()), want.get(name, ())
        if mine != its:
            first = [a == b for a, b in zip_longest(mine, its)].index(False)
            lines.append(f"{name}: token {first} of {len(its)}")
    return lines


@dataclass(frozen=True)
class Comparison:
    """Our outputs beside those of a stock backend.

    problems      why ours are not as they should be; empty when they are
    equal_tokens  share of tokens before a request's first difference: of ours and stock's, and of
                  two stock backends; None where all tokens must be equal
    """

    problems: list[str]
    equal_tokens: tuple[float, float] | None


def compare(ours: Run, stock: Run, noise: Run | None = None) -> Comparison:
    """Judge our outputs. Without `noise` all tokens must be equal, as they are in float32. With it,
    another stock backend's run, outputs may differ by what those two do: bf16 turns near-ties.
    Judged then are the prompts that hold no output, which alone are the same on all servers."""
    if noise is None:
        different, total = differences(ours, stock), len(stock.outputs)
        problems = [f"{len(different)} of {total} outputs differ, first {d}" for d in different[:1]]
        return Comparison(problems, None)
    tested, reference, other = (
        [output for output in run.outputs if output.fixed_prompt] for run in (ours, stock, noise)
    )
    try:
        here, found = near_ties.differ(reference, other), near_ties.differ(reference, tested)
    except ValueError as error:  # not the same requests, or not as many tokens
        return Comparison([str(error)], None)
    return Comparison(near_ties.verdict(found, here), (found.equal_share, here.equal_share))


def summarize(
    ours: Run, stock: Run, comparison: Comparison, *, sglang_version: str, device: str
) -> dict:
    """Return the content of demo.json; steps and KV tokens are of our run, for one layer."""
    steps: dict[str, dict[str, int]] = {"prefix": {}, "stock": {}}
    for name, count in sorted(by_labels(ours.counters, STEPS, "variant", "reason").items()):
        variant, _, reason = name.partition(":")
        steps[variant][reason] = int(count)
    plans = by_labels(ours.counters, _PLANS, "cause")
    return {
        "outputs": len(ours.outputs),
        "output_tokens": sum(len(output.token_ids) for output in ours.outputs),
        "outputs_equal": not differences(ours, stock),
        "equal_tokens": comparison.equal_tokens,
        "problems": comparison.problems,
        "prefix_steps": sum(steps["prefix"].values()),
        "stock_steps": sum(steps["stock"].values()),
        "steps_by_reason": steps,
        "plans_by_cause": {cause: int(count) for cause, count in plans.items()},
        **{
            f"kv_tokens_{kind}": int(total(ours.counters, KV_TOKENS, kind=kind))
            for kind in ("read", "query_centric", "unique")
        },
        "seconds": {run.backend: round(run.seconds, 2) for run in (ours, stock)},
        "backends": [ours.backend, stock.backend],
        "sglang_version": sglang_version,
        "device": device,
    }


def render(summary: dict, console: Console) -> None:
    ours, stock = summary["backends"]
    table = Table(title=f"--attention-backend {ours}, checked against {stock}", show_header=False)
    table.add_row("SGLang, device", f"{summary['sglang_version']}, {summary['device']}")
    table.add_row("outputs compared", f"{summary['outputs']}")
    table.add_row("output tokens", f"{summary['output_tokens']}")
    for variant, by_reason in summary["steps_by_reason"].items():
        for reason, count in by_reason.items():
            table.add_row(f"decode steps: {variant}, {reason}", f"{count}")
    for cause, count in summary["plans_by_cause"].items():
        table.add_row(f"plans: {cause}", f"{count}")
    read, query_centric = summary["kv_tokens_read"], summary["kv_tokens_query_centric"]
    table.add_row("KV tokens read per layer", f"{read}")
    table.add_row("KV tokens a query-centric kernel reads", f"{query_centric}")
    if read:
        table.add_row("ratio", f"{query_centric / read:.2f} x fewer")
    if summary["equal_tokens"] is None:
        table.add_row("outputs equal", "yes" if summary["outputs_equal"] else "NO")
    else:
        shares = ", of two stock backends ".join(
            f"{100 * x:.0f} %" for x in summary["equal_tokens"]
        )
        table.add_row("tokens before a first difference", shares)
        table.add_row("as near as two stock backends", "NO" if summary["problems"] else "yes")
    console.print(table)


def render_texts(ours: Run, stock: Run, tokenizer, console: Console) -> None:
    """Print what both answered side by side, each answer up to where it ends by itself."""

    def text(output: Output) -> str:
        kept = takewhile(lambda token: token != tokenizer.eos_token_id, output.token_ids)
        return escape(tokenizer.decode(list(kept)).strip())

    table = Table(title="answers", show_lines=True)
    for column in ("request", ours.backend, stock.backend):
        table.add_column(column)
    for mine, other in zip(ours.outputs, stock.outputs, strict=True):
        if mine.fixed_prompt:  # what programs write, of made-up words, says nothing to a reader
            table.add_row(escape(mine.name), text(mine), text(other))
    console.print(table)
