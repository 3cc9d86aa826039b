"""A trace through one server: when each token comes, and what its decode batches share.

A decode step takes a fixed time and the attention that is predicted for its batch. Every batch that
differs from the one before, and one that has grown by LOOK steps, is looked at: planned, predicted
and decided by the function that serves (step/evaluate.py). When twice MOST_LOOKS are there, about
half of them are forgotten, and from there on as many steps lie between two at least as between
those that are left; a batch that is not looked at takes for each KV token what those with about as
many took of late.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.records import PREFIX
from sgl_prefix_attn.step.evaluate import TimePredictor, evaluate
from sgl_prefix_attn.step.policy import BatchFacts
from sgl_prefix_attn.tools.analyze import server_loop as loop
from sgl_prefix_attn.tools.analyze import server_state as sv
from sgl_prefix_attn.tools.analyze.trace import Trace

MOST_LOOKS = 2048
LATE = 0.1  # weight of the latest look in what batches like it take


@dataclass(frozen=True)
class Look:
    """One decode batch.

    at, step   seconds, and decode steps before it
    running, waiting  requests
    tokens, unique, read  KV tokens: of all requests, each once, and as the server reads them
    is_prefix  whether it runs prefix kernels
    seconds    of the whole step
    """

    at: float
    step: int
    running: int
    waiting: int
    tokens: int
    unique: int
    read: int
    is_prefix: bool
    seconds: float

    @property
    def saved(self) -> float:
        """Return the share of KV reads that the server is spared."""
        return 1 - self.read / self.tokens


@dataclass(frozen=True)
class Simulated:
    """One server's run.

    looks     of its batches, in turn, and `steps` in all
    seconds   until the last token; of them so many were prefill
    reuse     KV tokens read one request at a time / unique ones, over all decode steps
    tokens    decoded
    tpot, ttft  float32 [n]  seconds; NaN for a request without
    too_long  requests that do not fit the pool
    cached    share of prompt tokens that were in the cache
    waited    most requests that ever waited
    """

    looks: list[Look]
    steps: int
    seconds: float
    prefill_seconds: float
    reuse: float
    tokens: int
    tpot: np.ndarray
    ttft: np.ndarray
    too_long: int
    cached: float
    waited: int

    @property
    def weights(self) -> np.ndarray:
        """Count the decode steps, int64 [looks], that each look stands for."""
        return np.diff([*(look.step for look in self.looks), self.steps])

    @property
    def generated(self) -> int:
        """Count the tokens that came, those of prefills too."""
        return self.tokens + int((~np.isnan(self.ttft)).sum())


def simulate(
    trace: Trace,
    costs: sv.Costs,
    layers: int,
    planner: Planner,
    predictor: TimePredictor,
    policy: str,
    progress: Callable[[int], None] = lambda done: None,
) -> Simulated:
    """Run the trace through a server whose policy is `policy`, as PREFIX_ATTN_POLICY has it;
    progress is told how many requests have begun.

    Raises ValueError where no request fits the pool.
    """
    state = sv.new_state(trace, costs)
    now, counts = state.now, state.counts
    looks: list[Look] = []
    facts = BatchFacts(policy=policy)
    node_of = np.full(trace.distinct_blocks, -1, np.int32)
    stride = 1
    while loop.advance(trace, costs, state, stride):
        step = int(counts[sv.N_STEPS])
        seq_lens = loop.lengths(trace, state)
        paths = loop.batch_paths(trace, state.running[: seq_lens.size], seq_lens, node_of)
        facts = replace(facts, steps=step - (looks[-1].step if looks else 0) + facts.steps)
        done = evaluate(paths, facts, planner, predictor)
        is_prefix = done.decision.variant == PREFIX
        if done.decision.variant != facts.running:
            facts = replace(facts, running=done.decision.variant, steps=0)
        us = (
            predictor.prefix(done.plan)
            if is_prefix
            else predictor.stock(seq_lens, done.plan.stats.kv_tokens_unique)
        )
        tokens = int(counts[sv.N_KV])
        attention = us * 1e-6 * layers
        now[sv.T_KV_TOKEN] = rate = attention / tokens
        like = loop.half_octave(tokens)
        before = state.rates[like] or rate
        state.rates[like] = before + LATE * (rate - before)
        looks.append(
            Look(
                at=float(now[sv.T_CLOCK]),
                step=step,
                running=seq_lens.size,
                waiting=int(counts[sv.N_ARRIVED] - counts[sv.N_NEXT]),
                tokens=tokens,
                unique=done.plan.stats.kv_tokens_unique,
                read=done.plan.stats.kv_tokens_read if is_prefix else tokens,
                is_prefix=is_prefix,
                seconds=loop.step_seconds(costs, seq_lens.size, attention),
            )
        )
        if len(looks) == 2 * MOST_LOOKS:
            stride = max(2 * stride, step // MOST_LOOKS)
            looks = _apart(looks, stride)
        progress(int(counts[sv.N_NEXT]))
    if counts[sv.N_TOO_LONG] == trace.size:
        raise ValueError(f"no request fits a pool of {costs.kv_tokens:,} KV tokens")
    read, unique = int(counts[sv.N_READ]), int(counts[sv.N_UNIQUE])
    return Simulated(
        looks=looks,
        steps=int(counts[sv.N_STEPS]),
        seconds=float(now[sv.T_CLOCK]),
        prefill_seconds=float(now[sv.T_PREFILL]),
        reuse=read / unique if unique else 1.0,
        tokens=int(counts[sv.N_TOKENS]),
        tpot=state.tpot,
        ttft=state.ttft,
        too_long=int(counts[sv.N_TOO_LONG]),
        cached=float(counts[sv.N_CACHED] / max(1, counts[sv.N_PROMPT])),
        waited=int(counts[sv.N_WAITING]),
    )


def _apart(looks: list[Look], stride: int) -> list[Look]:
    """Those with at least so many steps between them."""
    kept = looks[:1]
    for look in looks:
        if look.step - kept[-1].step >= stride:
            kept.append(look)
    return kept
