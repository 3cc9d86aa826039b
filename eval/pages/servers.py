"""Tables of servers under load and of agent programs."""

from __future__ import annotations

from statistics import geometric_mean

from eval.bench_agents.agent_tables import wall_ratios
from eval.bench_serving.rates import OFFLINE
from eval.bench_serving.serving_row import by_run, latency, median
from eval.markdown import table
from eval.pages.results import gpu_of, page_table, place, rows, source

# Label of a machine -> its files: servers of one machine have the same host.
FILES = {
    "serving_h200": "H200", "serving_rates_h200": "H200", "serving_loads_h200": "H200",
    "serving_h100": "H100 A", "serving_loads_h100": "H100 B", "serving_rates_h100": "H100 C",
    "serving_interval_h100": "H100 D, ten tokens at a time", "serving_repeated_h100": "H100 E",
    "serving_h200_c": "H200 C", "serving_h200_d": "H200 D, a slow host",
    "serving_h200_d_again": "H200 D, other servers", "serving_h200_e4m3": "H200 D, KV of e4m3",
}  # fmt: skip
README_ROWS = (
    ("serving_h200", "gsp", "32 groups of 16 prompts with 2048 tokens in common"),
    ("serving_h100", "gsp", "the same"),
    ("serving_h200", "grpo16", "16 samples of each of 16 prompts"),
    ("serving_loads_h100", "grpo16", "the same, on a slow host"),
    ("serving_h200", "fewshot", "128 questions after 6000 tokens of examples"),
    ("serving_h200", "conversation", "384 users below a system prompt of three levels"),
    ("serving_rates_h100", "conversation", "the same"),
    ("serving_h200", "agent", "160 requests below 16 tool prompts"),
    ("serving_h200", "unshared", "192 prompts with nothing in common"),
)
ROUTING = "routing_h200_x2"
STARTS = ("serving_h200", "serving_loads_h100", "serving_repeated_h100")
TITLES = {"default": "default", "flashinfer": "FlashInfer"}
STOCK = tuple(TITLES)


def readme() -> str:
    """Output tokens/s of the default, of the best stock backend and of prefix."""
    spread = _spread()
    lines = []
    for name, load, title in README_ROWS:
        served = {backend: _tokens(own) for backend, own in by_run(rows(name))[load, "inf"].items()}
        stock = {backend: served[backend] for backend in STOCK if backend in served}
        best = max(stock, key=lambda backend: stock[backend])
        gain = served["prefix"] / stock[best]
        verdict = "no difference" if abs(gain - 1) < spread else f"{gain:.2f}x"
        lines.append((title, place(name), f"{served['default']:,.0f}",
                      f"{stock[best]:,.0f} ({TITLES[best]})",
                      f"{served['prefix']:,.0f} ({verdict})"))  # fmt: skip
    columns = ("load", "measured on", "SGLang's default", "best SGLang backend", "prefix")
    return (
        f"{table(columns, lines)}\n\n"
        "Output tokens/s of one server, all requests at once; the factor is over the best SGLang "
        f"backend. Two servers of one backend differ by up to {100 * spread:.1f} % (less is no "
        "difference), and by more where [streaming sets the pace](eval/results/servers.md). "
        f"{source(*dict.fromkeys(row[0] for row in README_ROWS))}"
    )


@page_table(
    "load | machine | default | flashinfer | prefix | over default | over the better | "
    "TPOT p50 over default | cached | prefix steps",
    *FILES,
)
def loads():
    """All loads sent at once, or offline: output tokens/s, the time per token, and the share of
    prompts' tokens that each backend had cached."""
    for name, machine in FILES.items():
        for (load, rate), backends in by_run(rows(name)).items():
            if rate not in ("inf", OFFLINE):
                continue
            served = {backend: _tokens(own) for backend, own in backends.items()}
            stock = max((served[backend] for backend in STOCK if backend in served), default=0)
            each = (*STOCK, "prefix")
            cells = (f"{served[b]:.0f}" if b in served else "-" for b in each)
            ratios = (f"{served['prefix'] / of:.2f}" if of else "-"
                      for of in (served.get("default"), stock))  # fmt: skip
            steps = median(backends["prefix"], lambda row: row["prefix_share"])
            tpot = _over_default(backends, "tpot_ms", "p50")
            cached = ", ".join(
                f"{median(backends[b], lambda row: row['cached_share']):.0%}"
                for b in each
                if b in backends
            )
            yield _title(load, rate), machine, *cells, *ratios, tpot, cached, f"{steps:.0%}"


def rates() -> str:
    """Loads at a share of what the default serves: times over the default's."""
    lines, files = [], []
    for name, machine in FILES.items():
        for (load, rate), backends in by_run(rows(name)).items():
            if not rate.endswith("%"):
                continue
            files.append(name)
            asked = backends["default"][0]["asked_requests_per_s"]
            times = (_over_default(backends, *of) for of in
                     (("ttft_ms", "p50"), ("tpot_ms", "p50"), ("tpot_ms", "p99")))  # fmt: skip
            lines.append((f"`{load}`", machine, f"{asked:.1f} ({rate})", *times))
    columns = ("load", "machine", "requests/s", "TTFT p50", "TPOT p50", "TPOT p99")
    return f"{table(columns, lines)}\n\n{source(*dict.fromkeys(files))}"


@page_table(
    "load | the router's policy | default | prefix | over default | cached | requests of a server",
    ROUTING,
)
def routing():
    """Two servers behind a router: output tokens/s of both, the share of their prompts' tokens that
    was cached, and how many requests each was given."""
    by: dict[tuple, dict[str, dict]] = {}
    for row in rows(ROUTING):
        by.setdefault((row["load"], row["rate"], row["policy"]), {})[row["backend"]] = row
    for (load, rate, policy), found in by.items():
        default, prefix = found["default"], found["prefix"]
        tokens = [row["output_tokens_per_s"] for row in (default, prefix)]
        cached = ", ".join(f"{row['cached_share']:.0%}" for row in (default, prefix))
        requests = dict.fromkeys(" + ".join(map(str, x["requests"])) for x in (default, prefix))
        yield (_title(load, rate), policy.replace("_", " "), *(f"{x:.0f}" for x in tokens),
               f"{tokens[1] / tokens[0]:.2f}", cached, ", ".join(requests))  # fmt: skip


@page_table("measured on | the first server | later ones", *STARTS)
def starts():
    """Seconds until servers were ready, in the order in which a machine started them."""
    for name in STARTS:
        seconds = {(row["alternation"], row["backend"]): row["start_s"] for row in rows(name)}
        first, *later = (f"`{of}` {taken:.0f}" for (_, of), taken in seconds.items())
        yield place(name), first, ", ".join(later)


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


def _spread() -> float:
    """Return by how much two servers of one backend differ in output tokens/s, at most."""
    return max(
        max(tokens) / min(tokens) - 1
        for (_, rate), backends in by_run(rows("serving_repeated_h100")).items()
        if rate == "inf"
        for tokens in ([row["output_tokens_per_s"] for row in own] for own in backends.values())
    )
