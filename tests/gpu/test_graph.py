"""One captured graph for any tree: captured on padding alone, replayed with trees that have nothing
in common, padded batches and growing sequences."""

import math
from dataclasses import replace

import pytest
import torch

from sgl_prefix_attn.engine.build import padding_plan
from sgl_prefix_attn.execute.params import LayerParams
from tests.support.forests import path_table
from tests.support.gpu_problems import DEVICE, LLAMA, TREES, gpu_problem
from tests.support.kernels import FAMILIES, newest, planner_of, served_backend
from tests.support.problems import assert_attention
from tests.support.running import executor_of, load, poison

ROWS = 64  # the captured batch size
LAYERS = 3
HEADROOM = 20  # as many spare slots as the problems have

BATCHES = {
    "no_sharing": lambda: path_table([], [-1] * 29, [1 + (61 * i) % 300 for i in range(29)]),
    "one_root_full_batch": lambda: path_table(
        [(-1, 700)], [0] * ROWS, [1 + (31 * i) % 90 for i in range(ROWS)]
    ),
    "deep": TREES["deep"],
    "one_request": TREES["one_token"],
    "forty_roots": lambda: path_table(
        [(-1, 16 + 13 * i) for i in range(40)],
        [i % 40 for i in range(60)],
        [1 + (17 * i) % 50 for i in range(60)],
    ),
    "mixed": TREES["mixed"],
    "long": lambda: path_table([(-1, 4097), (0, 63)], [1, 0, 1], [1, 900, 63]),
}


class Server:
    """What a decode graph holds on to: static inputs, KV pools of every layer, one executor."""

    def __init__(self, family: str):
        backend = served_backend(family)
        self.planner = planner_of(backend, HEADROOM)
        self.problems = {name: gpu_problem(make(), room=HEADROOM) for name, make in BATCHES.items()}
        self.plans = {n: self.planner.plan(p.paths) for n, p in self.problems.items()}
        slots = max(p.k.shape[0] for p in self.problems.values())
        pool = (LAYERS, 2, slots, LLAMA.num_kv_heads, LLAMA.head_dim)
        rows = (LAYERS, ROWS, LLAMA.num_qo_heads, LLAMA.head_dim)
        kind = {"dtype": torch.bfloat16, "device": DEVICE}
        self.kv = torch.full(pool, math.nan, **kind)
        self.q = torch.full(rows, math.nan, **kind)
        self.out = torch.full(rows, math.nan, **kind)
        self.lse = torch.full(rows[:3], math.nan, device=DEVICE)
        self.seq_lens = torch.ones(ROWS, dtype=torch.int64, device=DEVICE)
        self.out_cache_loc = torch.zeros(ROWS, dtype=torch.int64, device=DEVICE)
        some = next(iter(self.problems.values()))
        self.sm_scale = some.sm_scale
        self.executor = executor_of(backend, some, *self.plans.values())
        self._load_padding()
        self.step()  # compiles, outside of the capture
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step()
        assert self.out.isnan().all(), "padding rows were written"

    def _load_padding(self):
        table = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
        row = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        self.executor.load(padding_plan(self.planner), table, row)

    def step(self):
        """What a captured decode step runs."""
        self.executor.append(self.seq_lens, self.out_cache_loc)
        for layer in range(LAYERS):
            self.executor.run(
                LayerParams(
                    self.q[layer], self.kv[layer, 0], self.kv[layer, 1],
                    self.out[layer], self.lse[layer], self.sm_scale, 0.0,
                )
            )  # fmt: skip

    def start(self, name):
        """A new batch, from poisoned memory: its plan is loaded, its inputs are in place."""
        problem = self.problems[name]
        poison(self.executor, problem)
        load(self.executor, problem, self.plans[name])
        self.kv.fill_(math.nan)
        self.put(problem)
        return problem

    def put(self, problem):
        """A step's inputs; layers differ in their values, not in their slots."""
        slots, batch = problem.k.shape[0], problem.q.shape[0]
        self.q.fill_(math.nan)
        self.out.fill_(math.nan)
        self.lse.fill_(math.nan)
        self.seq_lens.fill_(1)
        self.out_cache_loc.zero_()
        for layer in range(LAYERS):
            of_layer = layer_problem(problem, layer)
            self.kv[layer, 0, :slots], self.kv[layer, 1, :slots] = of_layer.k, of_layer.v
            self.q[layer, :batch] = of_layer.q
        self.seq_lens[:batch] = problem.seq_lens
        self.out_cache_loc[:batch] = problem.last_slots()

    def replay(self, problem):
        """Replay, and return the entries of kv_indices that changed."""
        before = self.executor.workspace.kv_indices.clone()
        self.graph.replay()
        batch = problem.q.shape[0]
        assert self.out[:, batch:].isnan().all(), "padding rows were written"
        assert self.lse[:, batch:].isnan().all(), "padding rows were written"
        assert self.executor.workspace.counters.eq(0).all()
        return (self.executor.workspace.kv_indices != before).nonzero().flatten().cpu()

    def check(self, problem):
        batch = problem.q.shape[0]
        for layer in range(LAYERS):
            out, lse = self.out[layer, :batch], self.lse[layer, :batch]
            assert_attention(layer_problem(problem, layer), out, lse)

    def newest(self, name, problem):
        """Entries where this step's slots belong, by the plan's words."""
        return newest(self.plans[name], problem.seq_lens)


def layer_problem(problem, layer):
    """The problem that a layer sees: other queries and values at the same slots."""
    return replace(problem, q=problem.q.roll(layer, dims=-1), v=problem.v.roll(layer, dims=-1))


@pytest.fixture(scope="module", params=FAMILIES)
def server(request):
    return Server(request.param)


def fresh(server, name):
    """The batch as it was made, whatever a test before grew."""
    server.problems[name] = gpu_problem(BATCHES[name](), room=HEADROOM)
    return server.start(name)


def test_replays_in_turn(server):
    """Large after small after large on one graph, the first again bit for bit. Each plan holds
    this step's slots already: the captured append must change nothing, for the batch and for the
    padding rows."""
    outs = []
    for name in [*BATCHES, next(iter(BATCHES))]:
        problem = fresh(server, name)
        changed = server.replay(problem).tolist()
        assert not changed, f"{name}: entries {changed[:8]} of kv_indices were overwritten"
        server.check(problem)
        outs.append(server.out[:, : problem.q.shape[0]].clone())
    assert torch.equal(outs[0], outs[-1])


@pytest.mark.parametrize("name", ["mixed", "no_sharing", "one_root_full_batch"])
def test_growing_through_replays(server, name):
    """No new plan until the headroom is full: lengths are read on the device."""
    problem = fresh(server, name)
    generator = torch.Generator().manual_seed(7)
    server.replay(problem)
    for step in range(HEADROOM):
        slots = problem.grow(generator)
        server.put(problem)
        batch = problem.q.shape[0]
        assert torch.equal(server.out_cache_loc[:batch], slots)
        changed = server.replay(problem)
        ends = server.newest(name, problem)
        assert set(changed.tolist()) <= set(ends.tolist()), "an entry of no request was written"
        assert torch.equal(server.executor.workspace.kv_indices.cpu()[ends].long(), slots.cpu())
        if step in (0, 1, HEADROOM // 2, HEADROOM - 1):
            server.check(problem)


def test_a_skipped_append_is_found_and_replaying_twice_is_idempotent(server):
    problem = fresh(server, "mixed")
    server.replay(problem)
    server.check(problem)
    stale = server.out_cache_loc.clone()
    slots = problem.grow(torch.Generator().manual_seed(9))
    server.put(problem)
    server.out_cache_loc.copy_(stale)
    server.replay(problem)
    with pytest.raises(AssertionError):
        server.check(problem)
    server.out_cache_loc[: slots.numel()] = slots
    server.replay(problem)
    first = server.out.clone()
    assert not server.replay(problem).numel()
    batch = problem.q.shape[0]
    assert torch.equal(server.out[:, :batch], first[:, :batch])
    server.check(problem)


def test_a_batch_of_padding_alone(server):
    """An idle rank replays the graph without requests: nothing is read, nothing written."""
    server._load_padding()
    for tensor in (server.kv, server.q, server.out):
        tensor.fill_(math.nan)
    before = server.executor.workspace.kv_indices.clone()
    server.graph.replay()
    assert server.out.isnan().all()
    assert torch.equal(server.executor.workspace.kv_indices, before)


def test_a_plan_of_another_tree_is_found(server):
    problem = fresh(server, "deep")
    load(server.executor, server.problems["forty_roots"], server.plans["forty_roots"])
    server.graph.replay()
    with pytest.raises(AssertionError):
        server.check(problem)
