"""Runs of agent programs as Markdown tables; of several alternations, medians."""

from __future__ import annotations

from statistics import geometric_mean, median

from eval.engine_process import uses_prefix
from eval.markdown import table

_FIGURES = ("requests", "output_tokens", "tokens_per_s", "tpot_ms", "cached_share", "prefix_steps")


def markdown(rows: list[dict]) -> str:
    """Tabulate wall times, then every figure."""
    figures = table(
        ("program", "backend", "requests", "output tokens", "tokens/s", "TPOT", "cached",
         "prefix steps"),
        [(*key, *_cells(group)) for key, group in _groups(rows).items()],
    )  # fmt: skip
    return f"{summary(rows)}\n\n{figures}"


def summary(rows: list[dict]) -> str:
    """Tabulate wall times with their ratios to the fastest stock backend."""
    programs = list(dict.fromkeys(row["program"] for row in rows))
    backends = list(dict.fromkeys(row["backend"] for row in rows))
    groups = _groups(rows)
    ratios = wall_ratios(rows)

    def wall(program: str, backend: str) -> str:
        if (program, backend) not in ratios:
            return "-"
        return (
            f"{_median(groups[program, backend], 'wall_s'):.2f} s ({ratios[program, backend]:.3f})"
        )

    def mean(backend: str) -> str:
        known = [ratios[p, backend] for p in programs if (p, backend) in ratios]
        return f"{geometric_mean(known):.3f}" if len(known) == len(programs) else "-"

    walls = [(program, *(wall(program, backend) for backend in backends)) for program in programs]
    return (
        f"Wall time of {rows[0]['count']} programs at once, and its ratio to the fastest stock "
        "backend's.\n\n"
        + table(("program", *backends), [*walls, ("geometric mean", *map(mean, backends))])
    )


def wall_ratios(rows: list[dict]) -> dict[tuple[str, str], float]:
    """Return (program, backend) -> wall time over that of the program's fastest stock backend; over
    its first backend's where none is stock."""
    walls = {key: _median(group, "wall_s") for key, group in _groups(rows).items()}
    ratios = {}
    for program, backend in walls:
        of_program = {b: wall for (p, b), wall in walls.items() if p == program}
        stock = [wall for b, wall in of_program.items() if not uses_prefix(b)]
        base = min(stock) if stock else next(iter(of_program.values()))
        ratios[program, backend] = walls[program, backend] / base
    return ratios


def _groups(rows: list[dict]) -> dict[tuple[str, str], list[dict]]:
    """Return the rows of each program and backend, the programs in their order."""
    groups: dict[tuple[str, str], list[dict]] = {}
    for program in dict.fromkeys(row["program"] for row in rows):
        for row in rows:
            if row["program"] == program:
                groups.setdefault((program, row["backend"]), []).append(row)
    return groups


def _cells(group: list[dict]) -> tuple:
    requests, output, rate, tpot, cached, prefix = (_median(group, name) for name in _FIGURES)
    steps = prefix + _median(group, "stock_steps")
    return (
        f"{requests:.0f}",
        f"{output:.0f}",
        f"{rate:.0f}",
        "-" if tpot is None else f"{tpot:.2f} ms",
        f"{cached:.3f}",
        f"{prefix:.0f} of {steps:.0f}" if steps else "-",
    )


def _median(group: list[dict], name: str) -> float | None:
    values = [row[name] for row in group if row[name] is not None]
    return median(values) if values else None
