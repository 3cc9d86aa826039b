"""Which batches the held-out set holds, and which lie outside of what was asked for."""

from __future__ import annotations

import numpy as np

from sgl_prefix_attn.calibrate.batches import LONGEST, MAX_BATCH, SHORTEST

# Field of a row -> edges: a part is from an edge up to below the next, the last one included.
PARTS = {
    "batch_size": (1, 2, 4, 8, 16, 32, 64, 128, MAX_BATCH),
    "shared_share": (0, 0.001, 0.25, 0.5, 0.75, 0.95),
    "mean_len": (SHORTEST, 256, 1024, 4096, 16384, LONGEST),
}


def coverage(rows: list[dict]) -> dict:
    """Count the measured batches in each part and in all three ranges; name the others."""
    measured = [row for row in rows if row["error"] is None]
    outside = [
        row
        for row in measured
        if any(not edges[0] <= row[name] <= edges[-1] for name, edges in PARTS.items())
    ]
    return {
        "inside": len(measured) - len(outside),
        "outside": [
            {"batch": title(row), **{name: row[name] for name in PARTS}} for row in outside
        ],
        "parts": {name: _count(measured, name, edges) for name, edges in PARTS.items()},
        "shortest": min((row["min_len"] for row in measured), default=None),
        "longest": max((row["max_len"] for row in measured), default=None),
    }


def title(row: dict) -> str:
    return f"seed {row['seed']} batch {row['index']} {row['name']}"


def _count(rows: list[dict], name: str, edges: tuple[float, ...]) -> dict[str, int]:
    counts, _ = np.histogram([row[name] for row in rows], edges)
    labels = [f"{low:g} to below {high:g}" for low, high in zip(edges, edges[1:], strict=False)]
    labels[-1] = f"{edges[-2]:g} to {edges[-1]:g}"
    return dict(zip(labels, counts.tolist(), strict=True))
