"""python -m eval.bench_serving.rate_plot RESULT.json OUT.png: latency over the rate, per load."""

from __future__ import annotations

import argparse
import sys

from eval import provenance
from eval.bench_serving.rates import OFFLINE
from eval.bench_serving.serving_row import median

_LINES = (
    ("TTFT p50, ms", lambda row: row["ttft_ms"]["p50"]),
    ("TPOT p50, ms", lambda row: row["tpot_ms"]["p50"]),
    ("TPOT p99, ms", lambda row: row["tpot_ms"]["p99"]),
    ("request p50, ms", lambda row: row["e2e_ms"]["p50"]),
)


def write(rows: list[dict], path: str) -> None:
    """Draw a column of panels per load, medians over alternations, over the requests/s served; the
    run with all requests at once is the ring. Offline runs are left out."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if row["rate"] != OFFLINE]
    loads = list(dict.fromkeys(row["load"] for row in rows))
    backends = list(dict.fromkeys(row["backend"] for row in rows))
    size = (4 * len(loads) + 1, 3 * len(_LINES))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(_LINES), len(loads), squeeze=False)
    for column, load in enumerate(loads):
        for line, (name, of) in enumerate(_LINES):
            panel = panels[line][column]
            for i, backend in enumerate(backends):
                own = [row for row in rows if (row["load"], row["backend"]) == (load, backend)]
                _curve(panel, own, of, backend, f"C{i}")
            panel.set_ylim(bottom=0)
            panel.set_ylabel(name)
        panels[0][column].set_title(load)
        panels[-1][column].set_xlabel("requests/s served")
    panels[0][0].legend()
    figure.savefig(path, dpi=120)


def _curve(panel, rows: list[dict], of, label: str, colour: str) -> None:
    points = []
    for rate in dict.fromkeys(row["rate"] for row in rows):
        same = [row for row in rows if row["rate"] == rate]
        at_once = same[0]["asked_requests_per_s"] is None
        points.append((median(same, lambda row: row["requests_per_s"]), median(same, of), at_once))
    points.sort()
    panel.plot(*_axes(points), ".-", color=colour, label=label)
    rings = [point for point in points if point[2]]
    panel.plot(*_axes(rings), "o", color=colour, fillstyle="none", markersize=9)


def _axes(points: list[tuple]) -> tuple[list, list]:
    return [x for x, _, _ in points], [y for _, y, _ in points]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.bench_serving.rate_plot")
    parser.add_argument("result", metavar="RESULT.json")
    parser.add_argument("picture", metavar="OUT.png")
    args = parser.parse_args(argv)
    try:
        rows = provenance.load(args.result)["rows"]
    except ValueError as error:
        parser.error(str(error))
    write(rows, args.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
