"""The table of servers behind a router."""

from __future__ import annotations

from eval.bench_serving.serving_row import median
from eval.markdown import table
from eval.pages.results import rows, source
from eval.pages.servers import run_title

ROUTING = "routing_h200_x2"


def routing() -> str:
    """Two servers behind a router."""
    return f"{of_routers(rows(ROUTING))}\n\n{source(ROUTING)}"


def of_routers(served: list[dict]) -> str:
    """Tabulate servers behind a router: output tokens/s of all, the share of their prompts' tokens
    that was cached, and how many requests each was given."""
    by: dict[tuple, dict[str, list[dict]]] = {}
    for row in served:
        backends = by.setdefault((row["load"], row["rate"], row["policy"]), {})
        backends.setdefault(row["backend"], []).append(row)
    lines = []
    for (load, rate, policy), backends in by.items():
        both = [backends.get(backend, []) for backend in ("default", "prefix")]
        tokens = [median(own, lambda row: row["output_tokens_per_s"]) for own in both]
        cached = (median(own, lambda row: row["cached_share"]) for own in both)
        requests = dict.fromkeys(
            " + ".join(map(str, row["requests"])) for own in both for row in own
        )
        lines.append((
            run_title(load, rate), policy.replace("_", " "),
            *("-" if x is None else f"{x:.0f}" for x in tokens),
            "-" if None in tokens else f"{tokens[1] / tokens[0]:.2f}",
            ", ".join("-" if x is None else f"{x:.0%}" for x in cached), ", ".join(requests),
        ))  # fmt: skip
    columns = ("load", "the router's policy", "default", "prefix", "over default", "cached",
               "requests of a server")  # fmt: skip
    return table(columns, lines)
