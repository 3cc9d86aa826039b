"""Rates at which a load is sent: all at once, so many requests a second, or a share of what the
first backend serves when all come at once. Answers are streamed, but for one rate: offline."""

from __future__ import annotations

import math
from dataclasses import dataclass

from eval.cli_values import amount, names

ALL_AT_ONCE, OFFLINE = "inf", "offline"


@dataclass(frozen=True)
class Rate:
    """`per_s` requests a second, or `share` of the first backend's; the label is how it was asked
    for. Answers are streamed token by token, or each is sent when it is complete."""

    label: str
    per_s: float = math.inf
    share: float | None = None
    streams: bool = True

    def resolve(self, saturation: float | None) -> float:
        """Return requests/s; `saturation`: those of the first backend, all at once. Raises
        ValueError without it if this is a share of it."""
        if self.share is None:
            return self.per_s
        if not saturation:
            raise ValueError(f"{self.label} of what is not known: the run all at once failed")
        return self.share * saturation


def parse(text: str) -> Rate:
    """Parse inf, offline, a number, or a percentage such as 70%."""
    if text in (ALL_AT_ONCE, OFFLINE):
        return Rate(text, streams=text != OFFLINE)
    if text.endswith("%"):
        return Rate(text, share=amount(text[:-1]) / 100)
    return Rate(text, per_s=amount(text))


def parse_all(text: str) -> list[Rate]:
    """Parse rates separated by commas, each once."""
    return [parse(part) for part in names(text)]


def in_order(rates: list[Rate]) -> list[Rate]:
    """Put the run that the shares are of first. Raises ValueError if it is missing."""
    shares = [rate.label for rate in rates if rate.share is not None]
    if shares and ALL_AT_ONCE not in [rate.label for rate in rates]:
        raise ValueError(
            f"argument --rates: {', '.join(shares)} is of the run {ALL_AT_ONCE}: add it"
        )
    return sorted(rates, key=lambda rate: (rate.label != ALL_AT_ONCE, rate.share is not None))


def saturation(rows: list[dict], load: str, backend: str) -> float | None:
    """Return the requests/s that a backend served when all came at once, the first time; None
    before it did. The first time alone, so that a share of it is one rate for all alternations."""
    at_once = {"load": load, "rate": ALL_AT_ONCE, "backend": backend, "alternation": 0}
    found = (row["requests_per_s"] for row in rows if at_once.items() <= row.items())
    return next(found, None)
