"""The row-tile kernel on a Hopper GPU: every cut of every tree against fp64 full attention."""

from __future__ import annotations

import math

import pytest
import torch

from sgl_prefix_attn.execute import row_tile_reference as oracle
from sgl_prefix_attn.execute.backends.choice import why_no_row_tiles
from sgl_prefix_attn.execute.backends.gluon_backend import GluonBackend
from sgl_prefix_attn.execute.executor import PlanExecutor
from sgl_prefix_attn.execute.params import Capacity, LayerParams
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.row_tile_planner import RowTilePlanner
from sgl_prefix_attn.records import HeadConfig
from tests.support.forests import path_table, random_paths
from tests.support.gpu_problems import DEVICE, TREES, gpu_problem
from tests.support.problems import assert_attention
from tests.support.row_tile_blocks import poisoned_blocks
from tests.support.running import PADDING

SHAPES = {
    "llama": (HeadConfig(32, 8, 128), torch.bfloat16, 0.0),
    "llama-tp8": (HeadConfig(4, 1, 128), torch.bfloat16, 0.0),
    "qwen-7": (HeadConfig(28, 4, 128), torch.float16, 0.0),
    "mha": (HeadConfig(8, 8, 64), torch.bfloat16, 0.0),
    "group-3": (HeadConfig(6, 2, 64), torch.float16, 30.0),
    "group-5": (HeadConfig(40, 8, 128), torch.bfloat16, 0.0),
    "group-16": (HeadConfig(32, 2, 128), torch.bfloat16, 20.0),
    "gemma": (HeadConfig(16, 8, 256), torch.bfloat16, 50.0),
    "gemma-7": (HeadConfig(14, 2, 256), torch.float16, 0.0),
    "gemma-mqa": (HeadConfig(16, 1, 256), torch.bfloat16, 0.0),
    "gemma-mha": (HeadConfig(3, 3, 256), torch.float16, 30.0),
}


@pytest.fixture(autouse=True)
def _hopper():
    heads, dtype, _ = SHAPES["llama"]
    if why_no_row_tiles(torch.device(DEVICE), heads, dtype) is not None:
        pytest.skip("the row-tile kernel is for sm_90")


class Runner:
    """An executor with room for some plans, over memory that was poison before one is loaded."""

    def __init__(self, problem, *plans, pdl=False):
        self.problem = problem
        self.backend = GluonBackend(problem.heads, problem.dtype, torch.device(DEVICE), pdl)
        self.executor = PlanExecutor(self.backend, Capacity.for_plans(*plans))
        self.ws = self.executor.workspace
        self.ws.kv_indices.fill_(problem.poison_slot)
        self.ws.keys.fill_(-1)
        self.ws.partial_out.fill_(math.nan)
        self.ws.partial_state.fill_(math.nan)
        self.load(problem, plans[0])

    def load(self, problem, plan):
        self.executor.load(plan, problem.req_to_token, problem.pool)

    def run(self):
        """out and LSE [B, ...] from outputs full of NaN; padding rows must keep theirs."""
        problem = self.problem
        batch = problem.q.shape[0]
        shape = (batch + PADDING, *problem.q.shape[1:])
        q = torch.full(shape, math.nan, dtype=problem.dtype, device=DEVICE)
        q[:batch] = problem.q
        out, lse = torch.full_like(q, math.nan), torch.full(shape[:2], math.nan, device=DEVICE)
        self.executor.run(layer_of(problem, q, problem.k, problem.v, out, lse))
        assert out[batch:].isnan().all() and lse[batch:].isnan().all(), "padding rows were written"
        assert not self.ws.tickets.any(), "the next launch starts from counters of 0"
        return out[:batch], lse[:batch]


def layer_of(problem, q, k, v, out, lse=None):
    return LayerParams(q, k, v, problem.seq_lens, out, lse, problem.sm_scale, problem.soft_cap)


def cuts_of(paths, heads, headroom=64, most=6):
    """Some of the paths' cuts, those with most parts and with none among them, and their plans."""
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    planner = RowTilePlanner(heads, num_sms=num_sms, headroom=headroom)
    forest = build_forest(paths)
    cuts = sorted(planner.cuts(forest), key=lambda cut: (int(cut.parts.max()), cut.most_queries))
    for cut in cuts[:: -max(1, len(cuts) // most)]:
        yield planner.serialize(forest, cut)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tree", TREES)
def test_every_tree(tree, shape):
    heads, dtype, soft_cap = SHAPES[shape]
    paths = TREES[tree]()
    problem = gpu_problem(paths, heads, dtype, soft_cap=soft_cap)
    for plan in cuts_of(paths, heads):
        runner = Runner(problem, plan)
        out, lse = runner.run()
        assert_attention(problem, out, lse)
        early = Runner(problem, plan, pdl=True)
        early.run()  # in full order behind the fill, unlike the next one
        again, again_lse = early.run()
        assert torch.equal(out, again) and torch.equal(lse, again_lse), "two runs differ"


# What is added to a logit by a token's position: the maximum of a row is taken anew rarely.
RISES = {
    "slowly": lambda at: at / 64,
    "by cliffs": lambda at: 100 * (at // 300),
    "for one token": lambda at: 20 * (at % 97 == 96),
    "falling": lambda at: -at / 10,
}


def climbing(problem, rise):
    """The problem with rise(position) in the logits of all tokens, up to noise in proportion."""
    group, steep = problem.heads.group_size, 8
    along = torch.nn.functional.normalize(problem.q[0, ::group].float(), dim=-1)  # a KV head's
    problem.q += (steep * along).repeat_interleave(group, 0).to(problem.dtype)
    position = torch.zeros(len(problem.k), device=DEVICE)
    for row, length in zip(problem.pool, problem.seq_lens, strict=True):
        slots = problem.req_to_token[row, :length].long()
        position[slots] = torch.arange(len(slots), device=DEVICE).float()
    added = rise(position) / (steep * problem.sm_scale)
    problem.k += (added[:, None, None] * along).to(problem.dtype)
    return problem


@pytest.mark.parametrize("shape", ["llama", "qwen-7", "mha", "gemma-7"])
@pytest.mark.parametrize("rise", RISES)
def test_scores_that_rise(rise, shape):
    heads, dtype, _ = SHAPES[shape]
    paths = TREES["mixed"]()
    problem = climbing(gpu_problem(paths, heads, dtype), RISES[rise])
    for plan in cuts_of(paths, heads):
        assert_attention(problem, *Runner(problem, plan).run())


def test_fill_and_append_write_what_the_interpreter_writes():
    paths = random_paths(7, 60, 12)
    heads = SHAPES["qwen-7"][0]
    problem = gpu_problem(paths, heads, torch.float16, room=3)
    for plan in cuts_of(paths, heads, headroom=3):
        runner = Runner(problem, plan)
        words = torch.from_numpy(plan.words.copy())
        blocks = poisoned_blocks(plan.num_blocks, problem.poison_slot)
        oracle.fill(words, problem.req_to_token.cpu(), problem.pool.cpu(), blocks)
        for step in range(5):  # two of them behind the headroom
            seq_lens = problem.seq_lens + step
            slots = torch.arange(60, device=DEVICE) + 100 * step
            runner.executor.append(seq_lens, slots)
            oracle.append(words, seq_lens.cpu(), slots.cpu(), blocks)
            entries = blocks.slots.numel()
            assert torch.equal(runner.ws.words[: words.numel()].cpu(), words)
            assert torch.equal(runner.ws.kv_indices[:entries].cpu(), blocks.slots)
            assert torch.equal(runner.ws.keys[:entries].cpu(), blocks.keys)


@pytest.mark.parametrize("shape", ["llama", "qwen-7", "mha", "gemma-7"])
def test_256_steps_in_one_graph(shape):
    """One captured append and forward serve all steps, and another tree after them."""
    heads, dtype, _ = SHAPES[shape]
    problem = gpu_problem(random_paths(11, 40, 9), heads, dtype, room=260)
    other = gpu_problem(random_paths(12, 40, 5), heads, dtype, room=260)
    planner = RowTilePlanner(heads, num_sms=132, headroom=256)
    plan, other_plan = planner.plan(problem.paths), planner.plan(other.paths)
    executor = Runner(problem, plan, other_plan).executor
    slots_in_pool = max(problem.k.shape[0], other.k.shape[0])
    k, v = (torch.full((slots_in_pool, *problem.k.shape[1:]), math.nan, dtype=dtype, device=DEVICE)
            for _ in range(2))  # fmt: skip
    q, out = (torch.full_like(problem.q, math.nan) for _ in range(2))
    seq_lens, cache_loc = problem.seq_lens.clone(), torch.zeros(40, dtype=torch.int64).to(DEVICE)

    def step():
        executor.append(seq_lens, cache_loc)
        executor.run(layer_of(problem, q, k, v, out))

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    generator = torch.Generator().manual_seed(0)
    for one, its_plan in ((problem, plan), (other, other_plan)):
        executor.load(its_plan, one.req_to_token, one.pool)
        for i in range(257):
            if i:
                cache_loc.copy_(one.grow(generator))
            seq_lens.copy_(one.seq_lens)
            if i in (0, 1, 2, 63, 64, 65, 200, 256):
                k[: one.k.shape[0]], v[: one.v.shape[0]] = one.k, one.v
                q.copy_(one.q)
                out.fill_(math.nan)
                graph.replay()
                assert_attention(one, out)
            else:
                executor.append(seq_lens, cache_loc)


@pytest.mark.parametrize("shape", ["llama", "llama-tp8", "mha", "gemma-mqa"])
def test_layers_of_a_graph_that_start_early(shape):
    """Dependent launches, one right behind the other: each layer attends with what the one before
    it wrote last, over the same partial results and counters."""
    heads, dtype, _ = SHAPES[shape]
    paths, generator = random_paths(13, 37, 6), torch.Generator().manual_seed(1)
    for plan in cuts_of(paths, heads):
        problem = gpu_problem(paths, heads, dtype, room=4)
        made = [Runner(problem, plan, pdl=pdl).executor for pdl in (False, True)]
        outs = [problem.q.new_full((8, *problem.q.shape), math.nan) for _ in made]
        seq_lens = problem.seq_lens.clone()
        cache_loc = torch.zeros(37, dtype=torch.int64, device=DEVICE)

        def step(executor, out, one=problem, seq_lens=seq_lens, cache_loc=cache_loc):
            executor.append(seq_lens, cache_loc)
            q = one.q
            for layer in out:
                executor.run(layer_of(one, q, one.k, one.v, layer))
                q = layer * 4  # another kernel between
                executor.run(layer_of(one, q, one.v, one.k, layer))
                q = layer  # none

        graphs = []
        for executor, out in zip(made, outs, strict=True):
            step(executor, out)
            torch.cuda.synchronize()
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1]):
                step(executor, out)
        for grown in range(4):
            if grown:
                cache_loc.copy_(problem.grow(generator))
            seq_lens.copy_(problem.seq_lens)
            for graph, out in zip(graphs, outs, strict=True):
                out.fill_(math.nan)
                graph.replay()
            assert outs[0].isfinite().all() and torch.equal(*outs)


def test_an_empty_plan_writes_nothing():
    heads = SHAPES["llama"][0]
    executor = PlanExecutor(
        GluonBackend(heads, torch.bfloat16, torch.device(DEVICE)), Capacity(0, 0, 0)
    )
    q = torch.randn(4, 32, 128, device=DEVICE).bfloat16()
    k = torch.randn(9, 8, 128, device=DEVICE).bfloat16()
    out = torch.full_like(q, math.nan)
    executor.run(LayerParams(q, k, k, torch.ones(4, device=DEVICE), out, None, 1.0, 0.0))
    assert out.isnan().all()


def test_slots_beyond_2_31_elements():
    """Slot times stride does not fit 32 bits."""
    heads = HeadConfig(32, 8, 128)
    problem = gpu_problem(path_table([(-1, 130)], [0] * 9, [70] * 9), heads)
    far = (1 << 31) // (heads.num_kv_heads * heads.head_dim) + 5
    k, v = (torch.empty(far + problem.k.shape[0], 8, 128, dtype=torch.bfloat16, device=DEVICE)
            for _ in range(2))  # fmt: skip
    k[far:], v[far:] = problem.k, problem.v
    problem.k, problem.v = k, v
    problem.req_to_token = problem.req_to_token + far
    for plan in cuts_of(problem.paths, heads, most=3):
        out, lse = Runner(problem, plan).run()
        assert_attention(problem, out, lse)
