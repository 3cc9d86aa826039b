"""Either family's kernel on a GPU: every cut of every tree against fp64 full attention."""

from __future__ import annotations

import math

import pytest
import torch

from sgl_prefix_attn.execute import interpreter as oracle
from sgl_prefix_attn.execute.backends.family import HOPPER, PORTABLE
from sgl_prefix_attn.execute.executor import PlanExecutor
from sgl_prefix_attn.execute.params import Capacity, LayerParams
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.records import HeadConfig
from tests.support.forests import path_table, random_paths
from tests.support.gpu_problems import DEVICE, TREES, gpu_problem
from tests.support.kernels import FAMILIES, backend_of, planner_of, plans_of_cuts
from tests.support.plan_blocks import poisoned_blocks
from tests.support.problems import assert_attention
from tests.support.running import PADDING, executor_of, plan_wrapper, wrapper_of
from tests.support.sinks import sinks_of

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


# what Hopper's kernels are not built for
MORE_SHAPES = {
    "dim-80": (HeadConfig(32, 8, 80), torch.bfloat16, 0.0),
    "dim-96": (HeadConfig(6, 6, 96), torch.float16, 5.0),
    "dim-16": (HeadConfig(8, 2, 16), torch.float16, 0.0),
    "group-32": (HeadConfig(32, 1, 64), torch.bfloat16, 0.0),
    "group-71": (HeadConfig(71, 1, 64), torch.float16, 0.0),
}
BOTH = pytest.mark.parametrize("family", FAMILIES)


class Runner:
    """An executor with room for some plans, over memory that was poison before one is loaded."""

    def __init__(self, problem, *plans, family=HOPPER, **options):
        self.problem = problem
        self.backend = backend_of(family, problem.heads, problem.dtype, **options)
        self.executor = executor_of(self.backend, problem, *plans)
        self.ws = self.executor.workspace
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
        assert not self.ws.counters.any(), "the next launch starts from counters of 0"
        return out[:batch], lse[:batch]


def layer_of(problem, q, k, v, out, lse=None):
    return LayerParams(q, k, v, out, lse, problem.sm_scale, problem.soft_cap, problem.sinks)


def cuts_of(paths, heads, headroom=64, most=6, family=HOPPER, dtype=torch.bfloat16):
    planner = planner_of(backend_of(family, heads, dtype), headroom)
    return plans_of_cuts(planner, build_forest(paths), most)


@pytest.mark.parametrize(
    ("family", "shape"),
    [*((HOPPER, name) for name in SHAPES), *((PORTABLE, name) for name in SHAPES | MORE_SHAPES)],
)
@pytest.mark.parametrize("tree", TREES)
def test_every_tree(tree, shape, family):
    heads, dtype, soft_cap = (SHAPES | MORE_SHAPES)[shape]
    paths = TREES[tree]()
    problem = gpu_problem(paths, heads, dtype, soft_cap=soft_cap)
    for plan in cuts_of(paths, heads, family=family, dtype=dtype):
        runner = Runner(problem, plan, family=family)
        out, lse = runner.run()
        assert_attention(problem, out, lse)
        if family == HOPPER:
            runner = Runner(problem, plan, pdl=True)
            runner.run()  # in full order behind the fill, unlike the next one
        again, again_lse = runner.run()
        assert torch.equal(out, again) and torch.equal(lse, again_lse), "two runs differ"


GPT_OSS = {
    "gpt-oss": (HeadConfig(64, 8, 64), torch.bfloat16, 0.0),
    "gpt-oss-tp8": (HeadConfig(8, 1, 64), torch.bfloat16, 0.0),
}


@BOTH
@pytest.mark.parametrize("shape", [*GPT_OSS, "llama", "mha", "group-16", "gemma", "gemma-7"])
@pytest.mark.parametrize("tree", ["mixed", "deep", "one_root_113", "lengths_1_63_4097"])
def test_sinks_join_each_row_once(tree, shape, family):
    heads, dtype, soft_cap = (SHAPES | GPT_OSS)[shape]
    paths = TREES[tree]()
    problem = gpu_problem(paths, heads, dtype, soft_cap=soft_cap)
    problem.sinks = sinks_of(heads, DEVICE)
    for plan in cuts_of(paths, heads, family=family, dtype=dtype):
        runner = Runner(problem, plan, family=family)
        out, lse = runner.run()
        assert_attention(problem, out, lse)
        again, again_lse = runner.run()
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


@BOTH
@pytest.mark.parametrize("shape", ["llama", "qwen-7", "mha", "gemma-7"])
@pytest.mark.parametrize("rise", RISES)
def test_scores_that_rise(rise, shape, family):
    heads, dtype, _ = SHAPES[shape]
    paths = TREES["mixed"]()
    problem = climbing(gpu_problem(paths, heads, dtype), RISES[rise])
    for plan in cuts_of(paths, heads, family=family):
        assert_attention(problem, *Runner(problem, plan, family=family).run())


@BOTH
def test_fill_and_append_write_what_the_interpreter_writes(family):
    paths = random_paths(7, 60, 12)
    heads = SHAPES["qwen-7"][0]
    problem = gpu_problem(paths, heads, torch.float16, room=3)
    for plan in cuts_of(paths, heads, headroom=3, family=family):
        runner = Runner(problem, plan, family=family)
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


@BOTH
@pytest.mark.parametrize("shape", ["llama", "qwen-7", "mha", "gemma-7"])
def test_256_steps_in_one_graph(shape, family):
    """One captured append and forward serve all steps, and another tree after them."""
    heads, dtype, _ = SHAPES[shape]
    problem = gpu_problem(random_paths(11, 40, 9), heads, dtype, room=260)
    other = gpu_problem(random_paths(12, 40, 5), heads, dtype, room=260)
    planner = planner_of(backend_of(family, heads, dtype), 256)
    plan, other_plan = planner.plan(problem.paths), planner.plan(other.paths)
    executor = Runner(problem, plan, other_plan, family=family).executor
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
    it wrote last, over the same partial results and counters; the first with the step's own
    queries."""
    heads, dtype, _ = SHAPES[shape]
    paths, generator = random_paths(13, 37, 6), torch.Generator().manual_seed(1)
    for plan in cuts_of(paths, heads):
        problem = gpu_problem(paths, heads, dtype, room=4)
        made = [Runner(problem, plan, pdl=pdl).executor for pdl in (False, True)]
        outs = [problem.q.new_full((8, *problem.q.shape), math.nan) for _ in made]
        q, seq_lens = problem.q.clone(), problem.seq_lens.clone()
        cache_loc = torch.zeros(37, dtype=torch.int64, device=DEVICE)

        def step(executor, out, one=problem, q=q, seq_lens=seq_lens, cache_loc=cache_loc):
            executor.append(seq_lens, cache_loc)
            executor.run(layer_of(one, q, one.k, one.v, out[0]))
            q = out[0]
            for layer in out[1:]:
                executor.run(layer_of(one, q, one.v, one.k, layer))  # right behind the last
                q = layer * 4  # another kernel between
                executor.run(layer_of(one, q, one.k, one.v, layer))
                q = layer

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
            q.copy_(problem.q)
            seq_lens.copy_(problem.seq_lens)
            for graph, out in zip(graphs, outs, strict=True):
                out.fill_(math.nan)
                graph.replay()
            assert_attention(problem, outs[1][0])
            assert outs[0].isfinite().all() and torch.equal(*outs)


@BOTH
def test_an_empty_plan_writes_nothing(family):
    executor = PlanExecutor(backend_of(family), Capacity(0, 0, 0))
    q = torch.randn(4, 32, 128, device=DEVICE).bfloat16()
    k = torch.randn(9, 8, 128, device=DEVICE).bfloat16()
    out = torch.full_like(q, math.nan)
    executor.run(LayerParams(q, k, k, out, None, 1.0, 0.0))
    assert out.isnan().all()


@BOTH
def test_plans_follow_each_other_on_one_workspace(family):
    """Each after a larger or smaller one, none synchronised; the first again bit for bit."""
    problems = [
        gpu_problem(TREES[name](), seed=i)
        for i, name in enumerate(("mixed", "one_token", "one_root_113", "deep"))
    ]
    planner = planner_of(backend_of(family))
    plans = [planner.plan(problem.paths) for problem in problems]
    runner, results = Runner(problems[0], *plans, family=family), []
    for i in (*range(len(plans)), 0):
        runner.load(problems[i], plans[i])
        runner.problem = problems[i]
        results.append(runner.run()[0])
        assert_attention(problems[i], results[-1])
    assert torch.equal(results[0], results[-1])


@BOTH
@pytest.mark.parametrize("scale", [3e4, 1e-4])
def test_values_at_both_ends_of_float16(scale, family):
    """Partial results are float16, scaled row by row: values near its largest number, or among its
    subnormal ones, lose nothing by it."""
    problem = gpu_problem(TREES["mixed"](), dtype=torch.float16)
    problem.v = (problem.v.float() / 8 * scale).half()
    for plan in cuts_of(problem.paths, problem.heads, family=family, most=3):
        assert_attention(problem, *Runner(problem, plan, family=family).run())


@BOTH
def test_strided_tensors_and_no_lse(family):
    """q, out and caches may be slices of larger tensors: only the last two dimensions are dense.
    Without an LSE, the library's default, nothing else changes."""
    problem = gpu_problem(TREES["mixed"]())
    runner = Runner(problem, planner_of(backend_of(family)).plan(problem.paths), family=family)
    want, _ = runner.run()
    dense = torch.full_like(problem.q, math.nan)
    runner.executor.run(problem.layer(dense))
    assert torch.equal(dense, want)
    both = torch.stack([problem.k, problem.v], dim=1)  # [slots, 2, Hkv, D]
    q = torch.stack([torch.full_like(problem.q, math.nan), problem.q], dim=1)
    out = torch.full_like(q, math.nan)
    runner.executor.run(problem.layer(out[:, 0], q=q[:, 1], k_cache=both[:, 0], v_cache=both[:, 1]))
    assert torch.equal(out[:, 0], want) and out[:, 1].isnan().all()


@BOTH
def test_runs_back_to_back_do_not_meet(family):
    """Many forwards in flight at once, on outputs of their own: counters and partial results of one
    must not reach the next; the same bits each time."""
    problem = gpu_problem(TREES["deep"]())
    for plan in cuts_of(problem.paths, problem.heads, family=family, most=3):
        runner = Runner(problem, plan, family=family)
        want, _ = runner.run()
        outs = [torch.full_like(problem.q, math.nan) for _ in range(64)]
        for out in outs:
            runner.executor.run(problem.layer(out))
        assert all(torch.equal(out, want) for out in outs)
        assert not runner.ws.counters.any()


@BOTH
def test_slots_beyond_2_31_elements(family):
    """Slot times stride does not fit 32 bits."""
    heads = HeadConfig(32, 8, 128)
    problem = gpu_problem(path_table([(-1, 130)], [0] * 9, [70] * 9), heads)
    far = (1 << 31) // (heads.num_kv_heads * heads.head_dim) + 5
    k, v = (torch.empty(far + problem.k.shape[0], 8, 128, dtype=torch.bfloat16, device=DEVICE)
            for _ in range(2))  # fmt: skip
    k[far:], v[far:] = problem.k, problem.v
    problem.k, problem.v = k, v
    problem.req_to_token = problem.req_to_token + far
    for plan in cuts_of(problem.paths, heads, most=3, family=family):
        out, lse = Runner(problem, plan, family=family).run()
        assert_attention(problem, out, lse)


# --- the wrapper, with a server's rates -----------------------------------------------------------


def check_wrapper(made, problem):
    out, lse = made.run(problem.q, (problem.k, problem.v), return_lse=True)
    assert lse.base == "2"
    assert_attention(problem, out, lse.values)
    given = torch.full_like(problem.q, math.nan)
    assert made.run(problem.q, (problem.k, problem.v), out=given) is given
    assert torch.equal(given, out)


@BOTH
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_wrapper_on_a_block_table(page_size, family):
    backend_of(family)
    nodes = [(-1, 512), (0, 128), (0, 64), (-1, 192)]
    leaf = [1] * 5 + [2] * 4 + [0] * 3 + [3] * 2 + [-1] * 3
    paths = path_table(nodes, leaf, [1, 63, 64, 65, 200] + [1 + 41 * i % 130 for i in range(12)])
    problem = gpu_problem(paths, page_size=page_size)
    made = wrapper_of(problem, kernels=family, page_size=page_size)
    table = problem.req_to_token[problem.pool][:, ::page_size] // page_size
    made.plan_block_table(table, problem.seq_lens.cpu())
    assert made.explain()["num_nodes"] >= 4
    check_wrapper(made, problem)


@BOTH
@pytest.mark.parametrize("soft_cap", [0.0, 30.0])
def test_wrapper_on_paths_over_appends(soft_cap, family):
    """Batches of other sizes follow each other: the workspace grows, and an earlier plan's words
    never show through."""
    backend_of(family)
    made = None
    for name in ("batch_1", "mixed", "one_token", "one_root_113", "deep"):
        problem = gpu_problem(TREES[name](), soft_cap=soft_cap)
        made = made or wrapper_of(problem, kernels=family)
        check_wrapper(plan_wrapper(made, problem), problem)
        generator = torch.Generator().manual_seed(1)
        for step in range(18 if name == "mixed" else 1):
            made.append(problem.grow(generator))
            if step in (0, 15, 17):
                check_wrapper(made, problem)


@BOTH
@pytest.mark.parametrize("tree", ["mixed", "deep", "one_token"])
def test_a_captured_wrapper_serves_later_plans(tree, family):
    """Append and three layers with LSE are one graph, which replays over a plan made later."""
    backend_of(family)
    problem = gpu_problem(TREES[tree]())
    made = plan_wrapper(wrapper_of(problem, kernels=family), problem)
    q = torch.full_like(problem.q, math.nan)
    cache_loc = torch.zeros(len(q), dtype=torch.int64, device=DEVICE)
    k, v = problem.k, problem.v

    def step():
        made.append(cache_loc)
        return [made.run(q, kv, return_lse=True) for kv in ((k, v), (v, k), (k, v))]

    step()  # compiles, outside of the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first, _, last = step()
    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        plan_wrapper(made, problem)
        cache_loc.copy_(problem.grow(generator))
        q.copy_(problem.q)
        graph.replay()
        for out, lse in (first, last):
            assert_attention(problem, out, lse.values)
