"""Two servers' greedy outputs against each other, and against the noise of two correct ones.

Up to a request's first different token both servers saw the same context, so their logits must
agree up to rounding there, and the difference itself must be a near-tie. After it the texts have
nothing to do with each other. Three figures follow:

    equal share    tokens before the first difference / all tokens
    gap            log-probability of the best less that of the second best token, of both servers,
                   at the first difference
    logprob error  mean |difference| of the chosen token's log-probability up to there, per request

Attention itself is judged more sharply by eval.compare_outputs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

# Allowed multiples of the noise. Both sides are maxima over many requests, rounding grows with the
# peaks of attention, and a planted fault moves them by an order of magnitude.
_GAP_FACTOR = 2.0
_LOGPROB_FACTOR = 3.0
_SHARE_MARGIN = 0.05
# Log-probabilities are float32: two runs of one backend may differ by this.
ROUNDING = 1e-3


@dataclass(frozen=True)
class Output:
    """What a server generated for one request.

    top           of each token the two best as (token id, log-probability)
    fixed_prompt  whether the prompt holds nothing that the server generated
    """

    name: str
    token_ids: tuple[int, ...]
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    fixed_prompt: bool = True


@dataclass(frozen=True)
class Difference:
    """Outputs of two servers for the same requests."""

    equal_share: float
    share_error: float  # standard error of equal_share over requests
    max_gap: float
    max_logprob_error: float  # of the worst request; NaN, as all maxima, where a value is
    max_logprob: float  # of the worst token


def differ(a: Sequence[Output], b: Sequence[Output]) -> Difference:
    """Compare the same requests, in order. Raises ValueError when they are not the same."""
    if len(a) != len(b) or not a:
        raise ValueError(f"{len(a)} and {len(b)} requests")
    tokens, equal, gaps, errors = [], [], [0.0], [[0.0]]
    for x, y in zip(a, b, strict=True):
        first = first_difference(x, y)
        tokens.append(len(x.token_ids))
        equal.append(tokens[-1] if first is None else first)
        if first is not None:
            gaps += [_gap(x.top[first]), _gap(y.top[first])]
        if equal[-1]:
            chosen = zip(x.token_ids[: equal[-1]], x.top, y.top, strict=False)
            errors.append([abs(_logprob(t, token) - _logprob(u, token)) for token, t, u in chosen])
    shares = [count / of for count, of in zip(equal, tokens, strict=True)]
    return Difference(
        equal_share=sum(equal) / sum(tokens),
        share_error=statistics.stdev(shares) / math.sqrt(len(shares)) if len(shares) > 1 else 0.0,
        max_gap=_most(gaps),
        max_logprob_error=_most(map(statistics.fmean, errors)),
        max_logprob=_most(map(_most, errors)),
    )


def _most(values: Iterable[float]) -> float:
    """Return the largest value, NaN where one is: max() would pass over it."""
    return float(np.max(list(values)))


def first_difference(a: Output, b: Output) -> int | None:
    """Return the index of the first different token, or None. Raises ValueError when the outputs
    are not of one length."""
    counts = len(a.token_ids), len(b.token_ids)
    if counts[0] != counts[1]:
        raise ValueError(f"a request has {counts[0]} and {counts[1]} output tokens")
    pairs = enumerate(zip(a.token_ids, b.token_ids, strict=True))
    return next((i for i, (x, y) in pairs if x != y), None)


def _gap(top: Sequence[tuple[int, float]]) -> float:
    return abs(top[0][1] - top[1][1])


def _logprob(top: Sequence[tuple[int, float]], token: int) -> float:
    """Look the token up: a greedy one is the best, and with an exact tie it may be second."""
    found = [logprob for other, logprob in top if other == token]
    if not found:
        raise ValueError(f"token {token} was chosen, but the best two are {top}")
    return found[0]


def verdict(tested: Difference, noise: Difference) -> list[str]:
    """Say why the tested pair is worse than two correct backends; empty when it is not."""
    problems = []
    margin = max(_SHARE_MARGIN, 3 * math.hypot(tested.share_error, noise.share_error))
    # A gap that rounding can turn around is at most twice the error of one log-probability.
    gap = max(noise.max_gap, 2 * noise.max_logprob, ROUNDING)
    error = max(noise.max_logprob_error, ROUNDING)
    if tested.equal_share < noise.equal_share - margin:
        problems.append(
            f"equal tokens {tested.equal_share:.3f}, of two correct backends "
            f"{noise.equal_share:.3f}"
        )
    if not tested.max_gap <= _GAP_FACTOR * gap:
        problems.append(
            f"first difference at a top-2 gap of {tested.max_gap:.3f}, noise reaches {gap:.3f}"
        )
    if not tested.max_logprob_error <= _LOGPROB_FACTOR * error:
        problems.append(
            f"log-probability error {tested.max_logprob_error:.4f}, noise reaches {error:.4f}"
        )
    return problems
