"""Two engines' greedy outputs against each other, and against the noise of two correct ones.

Up to a request's first different token both engines saw the same context, so their logits must
agree up to rounding there, and the difference itself must be a near-tie. After it the texts have
nothing to do with each other. Three figures follow:

    equal share    tokens before the first difference / all tokens
    gap            log-probability of the best less that of the second best token, of both engines,
                   at the first difference
    logprob error  mean |difference| of the chosen token's log-probability up to there, a request
"""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass

# Allowed multiples of the noise. Both sides are maxima over hundreds of requests, rounding grows
# with the peaks of attention, and a planted fault moves them by an order of magnitude.
_GAP_FACTOR = 2.0
_LOGPROB_FACTOR = 3.0
_SHARE_MARGIN = 0.05
# Log-probabilities are float32: two runs of one backend may differ by this.
_ROUNDING = 1e-3


@dataclass(frozen=True)
class RequestDifference:
    """One request: where the outputs part, gaps there, error before. None where they never do."""

    tokens: int
    first: int | None
    gap_a: float | None
    gap_b: float | None
    logprob_error: float | None
    logprob_max: float


@dataclass(frozen=True)
class Difference:
    """Outputs of two engines on one scenario."""

    requests: int
    tokens: int
    equal_share: float
    share_error: float  # standard error of equal_share over requests
    diverged: int
    gaps: list[list[float]]  # [of a, of b] at each first difference
    max_gap: float
    max_logprob_error: float  # of the worst request
    max_logprob: float  # of the worst token

    def as_dict(self) -> dict:
        return asdict(self)


def differ(a: list[dict], b: list[dict]) -> Difference:
    """Compare {"tokens", "top"} of the same requests, in order. Raises ValueError when they are
    not the same requests."""
    if len(a) != len(b) or not a:
        raise ValueError(f"{len(a)} and {len(b)} requests")
    parts = [_request(x, y) for x, y in zip(a, b, strict=True)]
    tokens = sum(part.tokens for part in parts)
    equal = [part.tokens if part.first is None else part.first for part in parts]
    shares = [count / part.tokens for count, part in zip(equal, parts, strict=True)]
    gaps = [[part.gap_a, part.gap_b] for part in parts if part.first is not None]
    errors = [part.logprob_error for part in parts if part.logprob_error is not None]
    return Difference(
        requests=len(parts),
        tokens=tokens,
        equal_share=sum(equal) / tokens,
        share_error=statistics.stdev(shares) / math.sqrt(len(shares)) if len(shares) > 1 else 0.0,
        diverged=len(gaps),
        gaps=gaps,
        max_gap=max((max(pair) for pair in gaps), default=0.0),
        max_logprob_error=max(errors, default=0.0),
        max_logprob=max(part.logprob_max for part in parts),
    )


def _request(a: dict, b: dict) -> RequestDifference:
    count = len(a["tokens"])
    if count != len(b["tokens"]):
        raise ValueError(f"a request has {count} and {len(b['tokens'])} output tokens")
    pairs = enumerate(zip(a["tokens"], b["tokens"], strict=True))
    first = next((i for i, (x, y) in pairs if x != y), None)
    errors = [
        abs(_logprob(a["top"][i], token) - _logprob(b["top"][i], token))
        for i, token in enumerate(a["tokens"][:first])
    ]
    return RequestDifference(
        tokens=count,
        first=first,
        gap_a=None if first is None else _gap(a["top"][first]),
        gap_b=None if first is None else _gap(b["top"][first]),
        logprob_error=statistics.fmean(errors) if errors else None,
        logprob_max=max(errors, default=0.0),
    )


def _gap(top: list) -> float:
    return abs(top[0][1] - top[1][1])


def _logprob(top: list, token: int) -> float:
    """A greedy token is the best one; with an exact tie it may be listed second."""
    found = [logprob for other, logprob in top if other == token]
    if not found:
        raise ValueError(f"token {token} was chosen, but the best two are {top}")
    return found[0]


@dataclass(frozen=True)
class Noise:
    """What two correct backends differ by, over all scenarios."""

    gap: float
    logprob_error: float


def noise_of(differences: list[Difference]) -> Noise:
    """A gap that rounding can turn around is at most twice the error of one log-probability."""
    gap = max(max(d.max_gap, 2 * d.max_logprob) for d in differences)
    error = max(d.max_logprob_error for d in differences)
    return Noise(max(gap, _ROUNDING), max(error, _ROUNDING))


def verdict(tested: Difference, noise: Noise, noise_here: Difference) -> list[str]:
    """Why the tested pair is worse than noise on a scenario; empty when it is not."""
    problems = []
    margin = max(_SHARE_MARGIN, 3 * math.hypot(tested.share_error, noise_here.share_error))
    if tested.equal_share < noise_here.equal_share - margin:
        problems.append(
            f"equal tokens {tested.equal_share:.3f}, of two correct backends "
            f"{noise_here.equal_share:.3f}"
        )
    if tested.max_gap > _GAP_FACTOR * noise.gap:
        problems.append(
            f"first difference at a top-2 gap of {tested.max_gap:.3f}, noise reaches "
            f"{noise.gap:.3f}"
        )
    if tested.max_logprob_error > _LOGPROB_FACTOR * noise.logprob_error:
        problems.append(
            f"log-probability error {tested.max_logprob_error:.4f}, noise reaches "
            f"{noise.logprob_error:.4f}"
        )
    return problems
