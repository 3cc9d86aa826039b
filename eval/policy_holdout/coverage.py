"""Which batches the held-out set holds, and which lie outside of what was asked for."""

from __future__ import annotations

from sgl_prefix_attn.calibrate.batches import LONGEST, MAX_BATCH, SHORTEST

# Field of a row -> edges: a part is from an edge up to below the next, the last one included.
PARTS = {
    "batch_size": (1, 2, 4, 8, 16, 32, 64, 128, MAX_BATCH),
    "shared_share": (0, 0.001, 0.25, 0.5, 0.75, 0.95),
    "mean_len": (SHORTEST, 256, 1024, 4096, 16384, LONGEST),
}


def coverage(rows: list[dict]) -> dict:
    """Measured batches in each part, those in all three ranges, and the names of the others."""
    measured = [row for row in rows if row["error"] is None]
    outside = [row for row in measured if not is_inside(row)]
    return {
        "inside": len(measured) - len(outside),
        "outside": [
            {"batch": title(row), **{field: row[field] for field in PARTS}} for row in outside
        ],
        "parts": {field: _count(measured, field, edges) for field, edges in PARTS.items()},
        "shortest": min((row["min_len"] for row in measured), default=None),
        "longest": max((row["max_len"] for row in measured), default=None),
    }


def is_inside(row: dict) -> bool:
    """Batch size, shared share and mean length are all in range."""
    return all(edges[0] <= row[field] <= edges[-1] for field, edges in PARTS.items())


def title(row: dict) -> str:
    return f"seed {row['seed']} batch {row['index']} {row['name']}"


def _count(rows: list[dict], field: str, edges: tuple[float, ...]) -> dict[str, int]:
    counts = {}
    for low, high in zip(edges, edges[1:], strict=False):
        last = high == edges[-1]
        counts[f"{low:g} to {'' if last else 'below '}{high:g}"] = sum(
            low <= row[field] and (row[field] <= high if last else row[field] < high)
            for row in rows
        )
    return counts
