"""python -m eval.bench_plan [--json OUT]: what a decode step costs on the host, on one core.

Requests and radix nodes look like SGLang's, so the walk of the tree is measured too, and each step
goes through the code that a server runs (StepPreparer: decide, check the plan's lifetime, walk,
plan, count). Prints medians:

    scratch  nothing known: walk all paths and plan
    join     one request more than in the step before
    leave    one request less
    steady   nothing changed but the lengths

--growth STEPS prints instead the mean over so many steps of 256 requests that all grow, whatever
plans they need: usual ones, and aligned ones, which end where a request begins to have two parts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import torch

from eval import provenance
from eval.bench_kernel.trees import Tree
from eval.cli_values import output, several
from sgl_prefix_attn.engine.determinism import PART_TOKENS
from sgl_prefix_attn.metrics.counters import StepCounters
from sgl_prefix_attn.paths.radix_reader import RadixReader
from sgl_prefix_attn.paths.tree_reader import RunningBatch
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.records import HeadConfig
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.step.preparer import StepPreparer
from sgl_prefix_attn.tools.argument_types import count

BATCHES = (16, 64, 256, 1024)
LEVELS = (1, 2, 3, 4, 5, 6)
_HEADS = HeadConfig(32, 8, 128)
_NUM_SMS = 132  # of an H100
_NODE_TOKENS = 128
_PRIVATE_TOKENS = 37
# Groups of requests below a prompt of their own, and whether each has own tokens of another number.
GROWING = {"16 x 16": (16, False), "64 x 4": (64, False), "16 x 16, all lengths differ": (16, True)}
_GROWING_REQUESTS = 256
_PROMPT_TOKENS, _OWN_TOKENS = (1024, 2048), (1, 1025)


class RadixCache:
    """Has the name by which paths/ knows SGLang's radix cache, and a count of remaps: nothing else
    of it is read."""

    prefix_attn_remaps = 0


RadixCache.__module__ = "sglang.srt.mem_cache.radix_cache"


def tree_of(batch: int, levels: int) -> Tree:
    """Make level sizes in geometric progression from one root to a node for every request."""
    counts = [round(batch ** (i / (levels - 1))) for i in range(levels)] if levels > 1 else [batch]
    return Tree(tuple(counts), (_NODE_TOKENS,) * levels)


@dataclass(eq=False)
class Node:
    """The attributes of SGLang's TreeNode that are read; compared by identity, as there."""

    parent: Node | None
    id: int
    value: torch.Tensor


@dataclass(eq=False)
class Request:
    """The attributes of SGLang's Req that are read; compared by identity, as there."""

    last_node: Node
    cache_protected_len: int
    req_pool_idx: int
    kv: object = field(default_factory=object)
    retraction_count: int = 0

    @property
    def rid(self) -> str:
        return str(self.req_pool_idx)


def fake_requests(tree: Tree) -> list[Request]:
    """Make one request for each leaf of the tree."""
    root = Node(None, 0, torch.zeros(0, dtype=torch.int64))
    made, above = 0, [root]
    for level, (nodes, length) in enumerate(zip(tree.counts, tree.lengths, strict=True)):
        parents = [above[tree.parent(level, i)] if level else root for i in range(nodes)]
        value = torch.zeros(length, dtype=torch.int64)
        above = [Node(parent, made + 1 + i, value) for i, parent in enumerate(parents)]
        made += nodes
    return [Request(node, tree.seq_len, i) for i, node in enumerate(above)]


def measure(batch: int, levels: int, planner: Planner, repeats: int) -> dict:
    """Time each kind of step, and the walk and the planner alone: median milliseconds."""
    reqs = fake_requests(tree_of(batch + 1, levels))
    fewer = reqs[:-1]
    cache = RadixCache()
    seq_lens = np.full(batch + 1, levels * _NODE_TOKENS + _PRIVATE_TOKENS, dtype=np.int64)
    slots = torch.zeros(1, 1, dtype=torch.int32)  # read only under PREFIX_ATTN_CHECK
    steps = StepPreparer(Settings(), planner, StepCounters())

    def batch_of(requests: list) -> RunningBatch:
        return RunningBatch(requests, cache, seq_lens[: len(requests)], slots)

    def step(requests: list) -> None:
        done = steps.prepare(batch_of(requests))
        if not done.is_prefix:
            raise RuntimeError(f"the step was not planned: {done.decision.reason}")

    def scratch() -> None:
        steps.lifetime.invalidate("capture")
        step(fewer)

    def grow() -> None:
        seq_lens[:] += 1

    times = {"scratch": median_ms(scratch, repeats)}
    times["join"] = median_ms(lambda: step(reqs), repeats, before=lambda: step(fewer))
    times["leave"] = median_ms(lambda: step(fewer), repeats, before=lambda: step(reqs))
    step(fewer)
    plans_before = sum(steps.counters.plans.values())
    steady = min(repeats, planner.headroom)
    times["steady"] = median_ms(lambda: step(fewer), steady, before=grow)
    if sum(steps.counters.plans.values()) != plans_before:
        raise RuntimeError("a steady step planned")
    reader = RadixReader()
    times["walk"] = median_ms(lambda: reader.read_paths(batch_of(fewer)), repeats)
    paths = reader.read_paths(batch_of(fewer))
    times["plan"] = median_ms(lambda: planner.plan(paths), repeats)
    return times


def growth(groups: int, all_differ: bool, planner: Planner, steps: int) -> dict:
    """Return the mean microseconds of a step, and the plans that were made."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(*_PROMPT_TOKENS, groups)
    root = Node(None, 0, torch.zeros(0, dtype=torch.int64))
    nodes = [Node(root, 1 + i, torch.zeros(n, dtype=torch.int64)) for i, n in enumerate(lengths)]
    of = np.repeat(np.arange(groups), _GROWING_REQUESTS // groups)
    reqs = [Request(nodes[g], int(lengths[g]), i) for i, g in enumerate(of)]
    own = draw.integers(*_OWN_TOKENS, of.size) if all_differ else 1
    seq_lens, cache, slots = lengths[of] + own, RadixCache(), torch.zeros(1, 1, dtype=torch.int32)
    preparer = StepPreparer(Settings(), planner, StepCounters())
    start = time.perf_counter()
    for _ in range(steps):
        seq_lens += 1
        preparer.prepare(RunningBatch(reqs, cache, seq_lens, slots))
    us = (time.perf_counter() - start) / steps * 1e6
    return {"steps": steps, "us": us, "plans": sum(preparer.counters.plans.values())}


def median_ms(
    work: Callable[[], object], repeats: int, before: Callable[[], object] = lambda: None
) -> float:
    times = []
    for _ in range(repeats):
        before()
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m eval.bench_plan", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--json", type=output, metavar="OUT")
    parser.add_argument("--batches", type=several(count), default=BATCHES)
    parser.add_argument("--levels", type=several(count), default=LEVELS)
    parser.add_argument("--repeats", type=count, default=51)
    parser.add_argument("--growth", type=count, metavar="STEPS", help="of fixed batches")
    args = parser.parse_args(argv)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rows = _growing(args.growth) if args.growth else _steps(args)
    if args.json:
        provenance.save(args.json, provenance.collect("eval.bench_plan", argv), rows)
    return 0


def _growing(steps: int) -> list[dict]:
    print("host microseconds per step, mean, one core")
    rows = []
    for part_tokens in (0, PART_TOKENS):
        planner = Planner(_HEADS, num_sms=_NUM_SMS, part_tokens=part_tokens)
        planner.warm_up()
        for name, (groups, all_differ) in GROWING.items():
            found = growth(groups, all_differ, planner, steps)
            rows.append({"requests": name, "part_tokens": part_tokens} | found)
            kind = "aligned" if part_tokens else "usual"
            print(f"{name:28} {kind:8} {found['us']:6.1f} us  {found['plans']} plans", flush=True)
    return rows


def _steps(args: argparse.Namespace) -> list[dict]:
    planner = Planner(_HEADS, num_sms=_NUM_SMS)
    planner.warm_up()
    print("host milliseconds per step, median, one core (walk and plan: the parts of scratch)")
    rows = []
    for batch, depth in product(args.batches, args.levels):
        times = measure(batch, depth, planner, args.repeats)
        nodes = sum(tree_of(batch, depth).counts)
        rows.append({"batch": batch, "levels": depth, "nodes": nodes, "ms": times})
        cells = "  ".join(f"{name} {ms:.4f}" for name, ms in times.items())
        print(f"{batch:5} requests {depth} levels {nodes:5} nodes  {cells}", flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
