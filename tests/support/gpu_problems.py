"""Problems, planners and executors of the GPU tests, as a server makes them."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from sgl_prefix_attn.execute.backends.triton_backend import TritonBackend
from sgl_prefix_attn.execute.executor import PlanExecutor
from sgl_prefix_attn.execute.params import Capacity
from sgl_prefix_attn.plan import Planner, TileSet
from sgl_prefix_attn.plan.tile_defaults import default_tile_set
from sgl_prefix_attn.predict.startup import default_costs
from sgl_prefix_attn.records import HeadConfig, PathTable, Plan
from tests.support.forests import path_table, random_paths
from tests.support.problems import Problem, make_problem

DEVICE = "cuda"
PADDING = 3  # rows of q and out above the batch, as in a captured graph
LLAMA = HeadConfig(32, 8, 128)


def gpu_problem(paths: PathTable, heads=LLAMA, dtype=torch.bfloat16, **options) -> Problem:
    """tests.support.problems.make_problem with its tensors on the GPU."""
    problem = make_problem(paths, heads, dtype, **options)
    moved = ("q", "k", "v", "req_to_token", "pool", "seq_lens")
    return replace(problem, **{name: getattr(problem, name).to(DEVICE) for name in moved})


def grow(problem: Problem, generator: torch.Generator) -> torch.Tensor:
    """Every request one token longer, as Problem.grow does it on the CPU."""
    slots = problem.req_to_token[problem.pool, problem.seq_lens.long()].long()
    for cache in (problem.k, problem.v):
        cache[slots] = _normal((slots.numel(), *cache.shape[1:]), problem.dtype, generator)
    problem.q = _normal(problem.q.shape, problem.dtype, generator)
    problem.seq_lens = problem.seq_lens + 1
    return slots


def _normal(shape, dtype, generator):
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def planner(heads=LLAMA, strategy="calibrated", tiles: TileSet | None = None, **options) -> Planner:
    """With the GPU's own tiles and costs, unless other tiles are given."""
    return Planner(
        heads,
        strategy=strategy,
        tile_set=tiles or default_tile_set(DEVICE, heads),
        costs=default_costs(DEVICE, heads),
        **options,
    )


def executor(
    problem: Problem, *plans: Plan, tiles: TileSet | None = None, parallel_tiles=True
) -> PlanExecutor:
    """Room for the plans; kv_indices full of the poison slot and partial rows full of NaN."""
    capacity = Capacity.for_plans(*plans)
    backend = TritonBackend(
        problem.heads,
        tiles or default_tile_set(DEVICE, problem.heads),
        problem.dtype,
        torch.device(DEVICE),
        parallel_tiles,
    )
    made = PlanExecutor(backend, capacity)
    poison(made, problem)
    return made


def poison(made: PlanExecutor, problem: Problem) -> None:
    made.workspace.kv_indices.fill_(problem.poison_slot)
    made.workspace.partial_out.fill_(math.nan)
    made.workspace.partial_state.fill_(math.nan)


def loaded(problem: Problem, plan: Plan, **options) -> PlanExecutor:
    made = executor(problem, plan, **options)
    made.load(plan, problem.req_to_token, problem.pool)
    return made


def run(made: PlanExecutor, problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """out and LSE, from outputs full of NaN; the padding rows must keep theirs."""
    batch = problem.q.shape[0]
    q = torch.full((batch + PADDING, *problem.q.shape[1:]), math.nan, dtype=problem.dtype)
    q = q.to(problem.q.device)
    q[:batch] = problem.q
    seq_lens = torch.cat([problem.seq_lens, problem.seq_lens.new_ones(PADDING)])
    out = torch.full_like(q, math.nan)
    lse = torch.full(q.shape[:2], math.nan, device=q.device)
    made.run(problem.layer(out, q=q, seq_lens=seq_lens, out_lse=lse))
    assert out[batch:].isnan().all() and lse[batch:].isnan().all(), "padding rows were written"
    return out[:batch], lse[:batch]


# --- trees: name -> paths; every length that ends a tile, a split or a page somewhere ------------


def _mixed() -> PathTable:
    """37 requests: shared by all, by some, by none; tails from 1 to 700 tokens."""
    nodes = [(-1, 512), (0, 96), (0, 33), (1, 64), (-1, 200)]
    leaf = [1] * 6 + [2] * 9 + [3] * 7 + [0] * 4 + [4] * 5 + [-1] * 6
    tails = [1 + (53 * i) % 97 for i in range(31)] + [1, 63, 64, 65, 700, 301]
    return path_table(nodes, leaf, tails)


def _deep() -> PathTable:
    """A chain of fourteen nodes; requests leave it at every depth, two at each."""
    lengths = [64, 1, 130, 17, 16, 63, 65, 128, 31, 2, 256, 7, 15, 40]
    nodes = [(i - 1, length) for i, length in enumerate(lengths)]
    leaf = [i for i in range(len(nodes)) for _ in range(2)]
    return path_table(nodes, leaf, [1 + (29 * i) % 70 for i in range(len(leaf))])


def _forty_roots() -> PathTable:
    nodes = [(-1, 16 + 13 * i) for i in range(40)]
    leaf = [i for i in range(40) for _ in range(1 + i % 3)]
    return path_table(nodes, leaf, [1 + (17 * i) % 50 for i in range(len(leaf))])


TREES = {
    "mixed": _mixed,
    "deep": _deep,
    "forty_roots": _forty_roots,
    "one_root_113": lambda: path_table(
        [(-1, 1024)], [0] * 113, [1 + (31 * i) % 130 for i in range(113)]
    ),
    "one_root_long": lambda: path_table([(-1, 4097)], [0] * 19, [1 + i for i in range(19)]),
    "unshared_37": lambda: path_table([], [-1] * 37, [1 + (61 * i) % 500 for i in range(37)]),
    "lengths_1_63_4097": lambda: path_table([], [-1] * 6, [1, 63, 4097, 1, 63, 4097]),
    "batch_1": lambda: path_table([(-1, 63)], [0], [4034]),
    "one_token": lambda: path_table([], [-1], [1]),
    "random": lambda: random_paths(5, 50, 24, max_depth=9),
}
