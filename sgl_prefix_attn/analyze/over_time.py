"""Findings as a picture over the simulated time."""

from __future__ import annotations

from pathlib import Path
from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sgl_prefix_attn.analyze.findings import Findings

INK, MUTED = "#1f2933", "#66727f"
PREFIX, STOCK, OTHER = "#2f6db3", "#d4732a", "#3c9a6b"


def draw(findings: Findings, layers: int) -> Figure:
    """Draw requests, reuse and predicted attention of both servers, each over its own time."""
    figure = Figure(figsize=(10, 8), dpi=120, layout="constrained")
    figure.suptitle(fill(findings.verdict, 120), x=0.01, ha="left", color=INK, fontsize=10)
    batch, shared, times = figure.subplots(3, 1)
    looks = findings.prefix.looks
    at = [look.at for look in looks]
    _line(batch, at, [look.running for look in looks], PREFIX, "running")
    _line(batch, at, [look.waiting for look in looks], STOCK, "waiting")
    _finish(batch, "Requests, with the plugin")
    _line(shared, at, [look.tokens / look.unique for look in looks], OTHER, "reuse")
    saved = shared.twinx()
    _line(saved, at, [look.saved for look in looks], PREFIX, "KV reads saved")
    _finish(saved, "", on_right=True)
    saved.set_ylim(0, 1)
    _finish(shared, "Concurrent reuse (left), share of KV reads saved (right)")
    for run, colour, name in (
        (findings.stock, STOCK, "FlashInfer"),
        (findings.prefix, PREFIX, "with the plugin"),
    ):
        ms = [look.us * layers / 1e3 for look in run.looks]
        _line(times, [look.at for look in run.looks], ms, colour, name)
    _finish(times, "Predicted attention of a decode step, ms")
    times.set_xlabel("simulated seconds", color=MUTED, fontsize=9)
    return figure


def save(figure: Figure, file: Path) -> None:
    """Write a PNG whose bytes depend on nothing but the picture."""
    figure.savefig(file, format="png", metadata={"Software": None})


def _line(ax: Axes, x: list[float], y: list[float], colour: str, name: str) -> None:
    ax.step(x, y, where="post", color=colour, linewidth=0.8, label=name)


def _finish(ax: Axes, title: str, on_right: bool = False) -> None:
    ax.set_title(title, loc="left", fontsize=10, color=INK)
    ax.set_ylim(bottom=0)
    ax.tick_params(colors=MUTED, labelsize=8, length=0)
    ax.spines[:].set_visible(False)
    ax.legend(loc="upper right" if on_right else "upper left", frameon=False, fontsize=8)
