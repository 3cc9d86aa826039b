"""Result files by name, and the line below a table that says where its numbers come from."""

from __future__ import annotations

from functools import cache

from eval import provenance

FOLDER = provenance.ROOT / "eval/results"


@cache
def load(name: str) -> dict:
    """Load eval/results/NAME.json."""
    return provenance.load(FOLDER / f"{name}.json")


def rows(name: str) -> list[dict]:
    return load(name)["rows"]


def place(name: str) -> str:
    """Say on which GPU and beside which SGLang a file was measured: "H100, SGLang 0.5.17"."""
    meta = load(name)["meta"]
    gpu = (meta["gpu"] or "CPU").removeprefix("NVIDIA ").partition(" ")[0]
    version = meta["versions"].get("sglang")
    return f"{gpu}, SGLang {version}" if version and gpu != "CPU" else gpu


def source(*names: str) -> str:
    """Name files by the place where they were measured."""
    by_place: dict[str, list[str]] = {}
    for name in names:
        by_place.setdefault(place(name), []).append(f"`{name}.json`")
    return "; ".join(f"{where}: {', '.join(files)}" for where, files in by_place.items()) + "."


def span(values, form: str) -> str:
    """Write the least and the largest of values, one where both read alike."""
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"
