"""Rows of a result file that a later call may keep; pure functions."""

from __future__ import annotations

from collections.abc import Iterable

from eval.bench_serving.rates import ALL_AT_ONCE

# What must be the same for rows of two calls to stand in one file.
SAME = ("machine", "gpu", "driver", "versions", "commit", "dirty", "settings")

Key = tuple[str, str, str, int]


def key(row: dict) -> Key:
    return row["load"], row["rate"], row["backend"], row["alternation"]


def kept(result: dict, meta: dict, wanted: Iterable[Key]) -> list[dict]:
    """Return the rows of loads that are whole: of whose wanted runs none is missing.

    Loads that are not asked for now are kept as they are. A load that was begun is measured anew,
    by all backends in turn. Raises ValueError if the file is of another machine, version or
    setting, or means another load by a name.
    """
    earlier = result["meta"]
    different = [name for name in SAME if earlier.get(name) != meta[name]]
    different += [
        name for name, load in meta["loads"].items() if earlier["loads"].get(name, load) != load
    ]
    if different:
        raise ValueError(
            f"its {', '.join(different)} differ from this call's: rows would not compare"
        )
    have = {key(row) for row in result["rows"]}
    begun = {one[0] for one in wanted if one not in have}
    return [row for row in result["rows"] if row["load"] not in begun]


def saturation(rows: list[dict], load: str, backend: str) -> float | None:
    """Return the requests/s that a backend served when all came at once, the first time; None
    before it did. The first time alone, so that a share of it is one rate for all alternations."""
    at_once = (load, ALL_AT_ONCE, backend, 0)
    return next((row["requests_per_s"] for row in rows if key(row) == at_once), None)
