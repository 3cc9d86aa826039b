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
ALONE_TOO = ("serving_h200_g", "serving_h200_g_again")
_SLOW_HOST = "a slow host"
FILES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("serving_h200",), "H200"),
    (("serving_rates_h200",), "H200"),
    (("serving_loads_h200",), "H200"),
    (("serving_h100",), "H100 A"),
    (("serving_loads_h100",), f"H100 B, {_SLOW_HOST}"),
    (("serving_rates_h100",), "H100 C"),
    (("serving_interval_h100",), "H100 D, ten tokens at a time"),
    (("serving_repeated_h100",), "H100 E"),
    (("serving_h200_d",), f"H200 D, {_SLOW_HOST}"),
    (("serving_h200_e4m3",), "H200 D, KV of e4m3"),
    (SLOW, f"H200 E, {_SLOW_HOST}"),
    (ALONE, "H200 F"),
    (ALONE_TOO, "H200 G"),
    (("serving_h200_h",), "H200 H"),
    (("serving_h200_i",), "H200 I"),
    (("serving_h200_e4m3_again",), "H200 I, KV of e4m3"),
)
README_ROWS: tuple[tuple[tuple[str, ...], str, str, str], ...] = (
    (ALONE, "gsp", OFFLINE, "32 groups of 16 prompts with 2048 tokens in common"),
    (ALONE, "gsp", ALL_AT_ONCE, "the same"),
    (("serving_h100",), "gsp", ALL_AT_ONCE, "the same"),
    (ALONE_TOO, "grpo16", OFFLINE, "16 samples of each of 16 prompts"),
    (("serving_loads_h100",), "grpo16", ALL_AT_ONCE, "the same"),
    (ALONE_TOO, "fewshot", OFFLINE, "128 questions after 6000 tokens of examples"),
    (ALONE_TOO, "conversation", OFFLINE, "384 users below a system prompt of three levels"),
    (("serving_h200_i",), "agent", OFFLINE, "160 requests below 16 tool prompts"),
    (ALONE, "unshared", OFFLINE, "192 prompts with nothing in common"),
)
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
    usual, streamed = (_most_apart(rate) for rate in (OFFLINE, ALL_AT_ONCE))
    lines = []
    for names, load, rate, title in README_ROWS:
        backends = by_run(_rows(names))[load, rate]
        served = {backend: _tokens(own) for backend, own in backends.items()}
        stock = {backend: served[backend] for backend in TITLES if backend in served}
        best = max(stock, key=lambda backend: stock[backend])
        factor = _factor(backends["prefix"], backends[best], usual)
        lines.append((title + _how(names, rate), place(names[0]), f"{served['default']:,.0f}",
                      f"{stock[best]:,.0f} ({TITLES[best]})",
                      f"{served['prefix']:,.0f} ({factor})"))  # fmt: skip
    columns = ("load", "measured on", "SGLang's default", "best SGLang backend", "prefix")
    return (
        f"{table(columns, lines)}\n\n"
        "Output tokens/s of one server (the median of two, where two ran), all requests at once, "
        "each answer in one piece unless streamed; the factor is over the best SGLang backend, "
        "from server to server where ours differ by more than others do. On fast hosts two servers "
        f"of one backend differ by up to {100 * usual:.1f} % (less is no difference); [streaming]"
        f"(eval/results/servers.md), by up to {100 * streamed:.0f} %. "
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
        for (load, rate), backends in by_run(_rows(names)).items():
            if rate not in (ALL_AT_ONCE, OFFLINE):
                continue
            either = [backends.pop(b) for b in ("flashinfer", BESIDE_FA3) if b in backends]
            if either:
                backends["flashinfer"] = max(either, key=_tokens)
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
            several = (b for b in COLUMNS if len(backends.get(b, [])) > 1)
            spreads = (f"{b} {_apart(backends[b]):.1%}" for b in several)
            yield (run_title(load, rate), machine, *cells, *ratios, ", ".join(spreads) or "-", tpot,
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


def _how(names: tuple[str, ...], rate: str) -> str:
    """Say that answers were streamed, and where by a slow host."""
    slow = _SLOW_HOST in dict(FILES)[names]
    return (", streamed" + f" by {_SLOW_HOST}" * slow) * (rate == ALL_AT_ONCE)


def _most_apart(rate: str) -> float:
    """Return by how much two servers of one backend, on a fast host, differ at most."""
    apart = (
        _apart(own)
        for names, machine in FILES
        if _SLOW_HOST not in machine
        for (_, of), backends in by_run(_rows(names)).items()
        if of == rate
        for own in backends.values()
    )
    return max(apart, default=0)


def _factor(own: list[dict], best: list[dict], usual: float) -> str:
    """Write our tokens/s over the best stock backend's, from our slowest server to our fastest
    where those differ by more than servers usually do."""
    if _gap(own, best) < usual:
        return "no difference"
    stock = _tokens(best)
    if _apart(own) <= usual:
        return f"{_tokens(own) / stock:.2f}x"
    low, high = _range(own)
    return f"{low / stock:.2f}x to {high / stock:.2f}x"


def run_title(load: str, rate: str) -> str:
    """Name a load, and that its answers were not streamed."""
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
    """Return the rows of files. Raises ValueError: a server did not complete every request."""
    found = [row for name in names for row in rows(name)]
    for row in found:
        if row["completed"] != row["sent"]:
            raise ValueError(f"{', '.join(names)}: {row['completed']} of {row['sent']} completed")
    return found


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
