"""Runs of agent programs as a Markdown table; of several alternations, medians."""

from __future__ import annotations

from statistics import geometric_mean, median

from eval.engine_process import uses_prefix
from eval.markdown import table


def markdown(rows: list[dict]) -> str:
    """Tabulate wall times with their ratios to the fastest stock backend."""
    programs = list(dict.fromkeys(row["program"] for row in rows))
    backends = list(dict.fromkeys(row["backend"] for row in rows))
    walls, ratios = _walls(rows), wall_ratios(rows)

    def cell(key: tuple[str, str]) -> str:
        return f"{walls[key]:.2f} s ({ratios[key]:.3f})" if key in walls else "-"

    def mean(backend: str) -> str:
        known = [ratios[p, backend] for p in programs if (p, backend) in ratios]
        return f"{geometric_mean(known):.3f}" if len(known) == len(programs) else "-"

    lines = [(p, *(cell((p, backend)) for backend in backends)) for p in programs]
    return (
        f"Wall time of {rows[0]['count']} programs at once, and its ratio to the fastest stock "
        "backend's.\n\n"
        + table(("program", *backends), [*lines, ("geometric mean", *map(mean, backends))])
    )


def wall_ratios(rows: list[dict]) -> dict[tuple[str, str], float]:
    """Return (program, backend) -> wall time over that of the program's fastest stock backend; over
    its first backend's where none is stock."""
    walls = _walls(rows)
    ratios = {}
    for program, backend in walls:
        of_program = {b: wall for (p, b), wall in walls.items() if p == program}
        stock = [wall for b, wall in of_program.items() if not uses_prefix(b)]
        base = min(stock) if stock else next(iter(of_program.values()))
        ratios[program, backend] = walls[program, backend] / base
    return ratios


def _walls(rows: list[dict]) -> dict[tuple[str, str], float]:
    """Return (program, backend) -> median wall time."""
    walls: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        walls.setdefault((row["program"], row["backend"]), []).append(row["wall_s"])
    return {key: median(times) for key, times in walls.items()}
