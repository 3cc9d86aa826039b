"""Tables of servers under load and of agent programs."""

from __future__ import annotations

from itertools import chain
from statistics import geometric_mean

from eval.bench_agents.agent_tables import wall_ratios
from eval.bench_serving.rates import ALL_AT_ONCE, OFFLINE
from eval.bench_serving.serving_row import by_run, latency, median
from eval.markdown import table
from eval.pages.results import gpu_of, page_table, place, rows, source

# Files of one commit and machine, which has one host; and the machine's label.
SLOW = ("serving_h200_e", "serving_h200_offline")
ALONE = ("serving_h200_f", "serving_h200_f_again")
FILES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("serving_h200",), "H200"),
    (("serving_rates_h200",), "H200"),
    (("serving_loads_h200",), "H200"),
    (("serving_h100",), "H100 A"),
    (("serving_loads_h100",), "H100 B"),
    (("serving_rates_h100",), "H100 C"),
    (("serving_interval_h100",), "H100 D, ten tokens at a time"),
    (("serving_repeated_h100",), "H100 E"),
    (("serving_h200_c",), "H200 C"),
    (("serving_h200_d",), "H200 D, a slow host"),
    (("serving_h200_e4m3",), "H200 D, KV of e4m3"),
    (SLOW, "H200 E, a slow host"),
    (ALONE, "H200 F"),
)
README_ROWS: tuple[tuple[tuple[str, ...], str, str, str], ...] = (
    (ALONE, "gsp", OFFLINE, "32 groups of 16 prompts with 2048 tokens in common"),
    (SLOW, "gsp", ALL_AT_ONCE, "the same, streamed by a slow host"),
    (("serving_h100",), "gsp", ALL_AT_ONCE, "the same, streamed"),
    (SLOW, "grpo16", OFFLINE, "16 samples of each of 16 prompts"),
    (("serving_loads_h100",), "grpo16", ALL_AT_ONCE, "the same, streamed by a slow host"),
    (SLOW, "fewshot", OFFLINE, "128 questions after 6000 tokens of examples"),
    (SLOW, "conversation", OFFLINE, "384 users below a system prompt of three levels"),
    (SLOW, "agent", ALL_AT_ONCE, "160 requests below 16 tool prompts, streamed"),
    (ALONE, "unshared", ALL_AT_ONCE, "192 prompts with nothing in common, streamed"),
)
ROUTING = "routing_h200_x2"
STARTS = (ALONE, ("serving_loads_h100",), ("serving_repeated_h100",))
BESIDE_FA3 = "fa3/flashinfer"  # FlashInfer decodes, as where our servers run no plan
TITLES = {
    "default": "default",
    "flashinfer": "FlashInfer",
    BESIDE_FA3: "FlashInfer beside FlashAttention 3",
}
COLUMNS = ("default", "flashinfer", "prefix")


def readme() -> str:
    """Output tokens/s of the default, of the best stock backend and of prefix."""
    repeated = by_run(rows("serving_repeated_h100"))
    usual = max(
        _apart(own)
        for (_, rate), backends in repeated.items()
        if rate == ALL_AT_ONCE
        for own in backends.values()
    )
    lines = []
    for names, load, rate, title in README_ROWS:
        backends = by_run(_rows(names))[load, rate]
        served = {backend: _tokens(own) for backend, own in backends.items()}
        stock = {backend: served[backend] for backend in TITLES if backend in served}
        best = max(stock, key=lambda backend: stock[backend])
        gain = served["prefix"] / stock[best]
        apart = _gap(backends["prefix"], backends[best])
        alone = ", the only one served" if len(stock) == 1 else ""
        verdict = "no difference" if apart < usual else f"{gain:.2f}x"
        lines.append((title, place(names[0]), f"{served['default']:,.0f}",
                      f"{stock[best]:,.0f} ({TITLES[best]}{alone})",
                      f"{served['prefix']:,.0f} ({verdict})"))  # fmt: skip
    columns = ("load", "measured on", "SGLang's default", "best SGLang backend", "prefix")
    return (
        f"{table(columns, lines)}\n\n"
        "Output tokens/s of one server (the median of two, where two ran), all requests at once, "
        "each answer in one piece unless streamed; the factor is over the best SGLang backend. Two "
        f"servers of one backend differ by up to {100 * usual:.1f} % on a fast host (less is no "
        "difference), and by more on [a slow one](eval/results/servers.md). "
        f"{source(*dict.fromkeys(chain.from_iterable(row[0] for row in README_ROWS)))}"
    )


@page_table(
    "load | machine | default | flashinfer | prefix | over default | over the better | "
    "starts differ by | TPOT p50 over default | cached | prefix steps",
    *chain.from_iterable(names for names, _ in FILES),
)
def loads():
    """All loads sent at once, or offline: output tokens/s and how far two servers of one backend
    are apart, the time per token, and the share of prompts' tokens that each backend had cached.
    FlashInfer's column has it beside another prefill backend, too."""
    for names, machine in FILES:
        served_by = [
            row | {"backend": "flashinfer"} if row["backend"] == BESIDE_FA3 else row
            for row in _rows(names)
        ]
        for (load, rate), backends in by_run(served_by).items():
            if rate not in (ALL_AT_ONCE, OFFLINE):
                continue
            served = {backend: _tokens(own) for backend, own in backends.items()}
            stock = max((served[b] for b in COLUMNS if b in served and b != "prefix"), default=0)
            cells = (f"{served[b]:.0f}" if b in served else "-" for b in COLUMNS)
            ratios = (f"{served['prefix'] / of:.2f}" if of else "-"
                      for of in (served.get("default"), stock))  # fmt: skip
            steps = median(backends["prefix"], lambda row: row["prefix_share"])
            tpot = _over_default(backends, "tpot_ms", "p50")
            cached = ", ".join(
                f"{median(backends[b], lambda row: row['cached_share']):.0%}"
                for b in COLUMNS
                if b in backends
            )
            several = (backends[b] for b in COLUMNS if len(backends.get(b, [])) > 1)
            spreads = (f"{_apart(own):.1%}" for own in several)
            yield (_title(load, rate), machine, *cells, *ratios, ", ".join(spreads) or "-", tpot,
                   cached, f"{steps:.0%}")  # fmt: skip


def rates() -> str:
    """Loads at a share of what the default serves: times over the default's."""
    lines, files = [], []
    for names, machine in FILES:
        for (load, rate), backends in by_run(_rows(names)).items():
            if not rate.endswith("%"):
                continue
            files += names
            asked = backends["default"][0]["asked_requests_per_s"]
            times = (_over_default(backends, *of) for of in
                     (("ttft_ms", "p50"), ("tpot_ms", "p50"), ("tpot_ms", "p99")))  # fmt: skip
            lines.append((f"`{load}`", machine, f"{asked:.1f} ({rate})", *times))
    columns = ("load", "machine", "requests/s", "TTFT p50", "TPOT p50", "TPOT p99")
    return f"{table(columns, lines)}\n\n{source(*dict.fromkeys(files))}"


def routing() -> str:
    """Two servers behind a router."""
    return f"{of_routers(rows(ROUTING))}\n\n{source(ROUTING)}"


def of_routers(served: list[dict]) -> str:
    """Tabulate servers behind a router: output tokens/s of all, the share of their prompts' tokens
    that was cached, and how many requests each was given."""
    by: dict[tuple, dict[str, dict]] = {}
    for row in served:
        by.setdefault((row["load"], row["rate"], row["policy"]), {})[row["backend"]] = row
    lines = []
    for (load, rate, policy), found in by.items():
        default, prefix = found["default"], found["prefix"]
        tokens = [row["output_tokens_per_s"] for row in (default, prefix)]
        cached = ", ".join(f"{row['cached_share']:.0%}" for row in (default, prefix))
        requests = dict.fromkeys(" + ".join(map(str, x["requests"])) for x in (default, prefix))
        lines.append((_title(load, rate), policy.replace("_", " "), *(f"{x:.0f}" for x in tokens),
                      f"{tokens[1] / tokens[0]:.2f}", cached, ", ".join(requests)))  # fmt: skip
    columns = ("load", "the router's policy", "default", "prefix", "over default", "cached",
               "requests of a server")  # fmt: skip
    return table(columns, lines)


@page_table("measured on | the first server | later ones", *chain.from_iterable(STARTS))
def starts():
    """Seconds until servers were ready, in the order in which a machine started them."""
    for names in STARTS:
        servers = {
            (name, row["alternation"], row["backend"]): row["start_s"]
            for name in names
            for row in rows(name)
        }
        first, *later = (f"`{of}` {seconds:.0f}" for (*_, of), seconds in servers.items())
        yield place(names[0]), first, ", ".join(later)


def agents() -> str:
    """Wall time of agent programs, and its ratio to the faster stock backend's."""
    files = ("agents_h200", "agents_h100")
    ratios = [wall_ratios(rows(name)) for name in files]
    programs = list(dict.fromkeys(row["program"] for row in rows(files[0])))
    lines = [
        (f"`{program}`", *(f"{by[program, backend]:.2f}" for by in ratios
                           for backend in ("default", "prefix")))
        for program in programs
    ]  # fmt: skip
    means = (f"{geometric_mean(by[program, backend] for program in programs):.2f}"
             for by in ratios for backend in ("default", "prefix"))  # fmt: skip
    columns = ("program", *(f"{gpu_of(name)}: {backend}" for name in files
                            for backend in ("default", "prefix")))  # fmt: skip
    count = rows(files[0])[0]["count"]
    return (
        f"{table(columns, [*lines, ('geometric mean', *means)])}\n\n"
        f"{count} programs at once. {source(*files)}"
    )


def _title(load: str, rate: str) -> str:
    return f"`{load}`" + (", offline" if rate == OFFLINE else "")


def _tokens(own: list[dict]) -> float:
    return median(own, lambda row: row["output_tokens_per_s"])


def _over_default(backends: dict[str, list[dict]], metric: str, at: str) -> str:
    own, stock = (
        median(backends.get(b, []), lambda row: latency(row, metric, at))
        for b in ("prefix", "default")
    )
    return "-" if own is None or stock is None else f"{own / stock:.2f}"


def _rows(names: tuple[str, ...]) -> list[dict]:
    return [row for name in names for row in rows(name)]


def _apart(own: list[dict]) -> float:
    """Return by how much the fastest of some servers exceeds the slowest in output tokens/s."""
    slowest, fastest = _range(own)
    return fastest / slowest - 1


def _gap(some: list[dict], others: list[dict]) -> float:
    """Return by how much all servers of the faster kind exceed all of the other; negative where
    neither is faster throughout."""
    (low, high), (other_low, other_high) = _range(some), _range(others)
    return max(low / other_high, other_low / high) - 1


def _range(own: list[dict]) -> tuple[float, float]:
    tokens = [row["output_tokens_per_s"] for row in own]
    return min(tokens), max(tokens)
