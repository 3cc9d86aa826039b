"""How often a set of held-out batches was judged, by which calibration, with what result.

A set of seeds that was judged once is no longer unseen for what is changed afterwards: result files
keep every judgement, in the order they were made.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from eval import provenance
from eval.policy_holdout.judge import figures, is_slower, is_unshared_slower
from sgl_prefix_attn.predict.codec import encode
from sgl_prefix_attn.predict.record import Calibration


def add(past: list[dict], meta: dict, rows: list[dict], note: str | None) -> list[dict]:
    """`past` and the judgement of these rows; rows without any measurement are no judgement.

    meta: of the run that judges, its "calibration" with "origin" and "sha256".
    """
    measured = [row for row in rows if row["error"] is None]
    if not measured:
        return past
    found = figures(measured)
    judgement = {
        **{name: meta[name] for name in ("date", "commit", "dirty")},
        "calibration": {name: meta["calibration"][name] for name in ("origin", "sha256")},
        "regret": found["regret"],
        "worst": found["worst"],
        "slower": sum(is_slower(row) or is_unshared_slower(row) for row in measured),
        "note": note,
    }
    return [*past, judgement]


def of_file(path: str | Path, seeds: list[int]) -> list[dict]:
    """The judgements in a result file; none where there is no file, or none of the seeds in it.

    Raises ValueError for a file that is no result, or keeps no judgements."""
    if not Path(path).is_file():
        return []
    result = provenance.load(path)
    if set(seeds).isdisjoint(row.get("seed") for row in result["rows"]):
        return []
    if "judgements" not in result.get("summary", {}):
        raise ValueError(f"{path} does not say how often its batches were judged: measure again")
    return result["summary"]["judgements"]


def has_changed(judgements: list[dict]) -> bool:
    """Not all of them judged the same calibration."""
    return len({entry["calibration"]["sha256"] for entry in judgements}) > 1


def sha256(path: Path | None, calibration: Calibration) -> str:
    """Of the file; without one, of the file that the calibration would be written to."""
    data = encode(calibration) if path is None else path.read_bytes()
    return hashlib.sha256(data).hexdigest()
