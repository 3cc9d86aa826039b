"""Result files by name, and the line below a table that says where its numbers come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, wraps

from eval import provenance
from eval.markdown import table

FOLDER = provenance.ROOT / "eval/results"


@cache
def load(name: str) -> dict:
    """Load eval/results/NAME.json."""
    return provenance.load(FOLDER / f"{name}.json")


def rows(name: str) -> list[dict]:
    return load(name)["rows"]


def gpu_of(name: str) -> str:
    """Name the GPU on which a file was measured: "H100", or "CPU" where it was none."""
    return (load(name)["meta"]["gpu"] or "CPU").removeprefix("NVIDIA ").partition(" ")[0]


def place(name: str) -> str:
    """Say on which GPU and beside which SGLang a file was measured: "H100, SGLang 0.5.17"."""
    gpu, version = gpu_of(name), load(name)["meta"]["versions"].get("sglang")
    return f"{gpu}, SGLang {version}" if version and gpu != "CPU" else gpu


def source(*names: str) -> str:
    """Name files by the place where they were measured."""
    by_place: dict[str, list[str]] = {}
    for name in names:
        by_place.setdefault(place(name), []).append(f"`{name}.json`")
    return "; ".join(f"{where}: {', '.join(files)}" for where, files in by_place.items()) + "."


def page_table(header: str, *files: str) -> Callable[[Callable[[], Iterable]], Callable[[], str]]:
    """Make the text of a table out of what yields its lines; bars stand between the columns' names,
    and the files, if there are any, are named below."""

    def decorate(lines: Callable[[], Iterable]) -> Callable[[], str]:
        @wraps(lines)
        def text() -> str:
            below = f"\n\n{source(*files)}" if files else ""
            return table(header.split(" | "), lines()) + below

        return text

    return decorate


def span(values, form: str) -> str:
    """Write the least and the largest of values, one where both read alike."""
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"
