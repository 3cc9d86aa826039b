"""Two engines' log-probabilities of the same tokens, judged by those of two stock backends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from eval.compare_outputs.teacher import Sampled

# Like the bound on attention: twice the error of what is known to be right.
_FACTOR = 2.0
# Log-probabilities are float32: two runs of one backend may differ by this.
_ROUNDING = 1e-3


@dataclass(frozen=True)
class LogprobError:
    """Decoded tokens of two engines, nats.

    mean, max      |difference| of the token's log-probability, over `tokens` tokens
    worst_request  the largest mean over one request's tokens
    equal_greedy   share of tokens where both would have chosen the same
    """

    tokens: int
    mean: float
    worst_request: float
    max: float
    equal_greedy: float


def compare(reference: Sequence[Sampled], other: Sequence[Sampled]) -> LogprobError:
    """Compare the tokens of `other`. Raises ValueError unless the reference has the same."""
    known = {(step.request, step.context): step for step in reference}
    missing = sum((step.request, step.context) not in known for step in other)
    if missing or not other:
        raise ValueError(f"{missing} of {len(other)} decoded tokens are not the reference's")
    errors, equal = defaultdict(list), []
    for step in other:
        same = known[step.request, step.context]
        if same.token != step.token:
            raise ValueError(f"{step.request} went on with another token at {step.context}")
        errors[step.request].append(abs(same.logprob - step.logprob))
        equal.append(same.greedy == step.greedy)
    every = [error for of_request in errors.values() for error in of_request]
    return LogprobError(
        tokens=len(every),
        mean=fmean(every),
        worst_request=max(map(fmean, errors.values())),
        max=max(every),
        equal_greedy=fmean(equal),
    )


def problem(tested: LogprobError, noise: Sequence[LogprobError]) -> str | None:
    """Say why an engine is further from the reference than stock ones are (`noise`; in float32 none
    are needed), or return None."""
    for name in ("mean", "worst_request"):
        error = getattr(tested, name)
        allowed = _FACTOR * max([_ROUNDING, *(getattr(n, name) for n in noise)])
        if not error <= allowed:
            return f"{name.replace('_', ' ')} error {error:.4f}, at most {allowed:.4f}"
    return None
