"""The library API where it decodes: plan, append, run, explain, by either family."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sgl_prefix_attn
from sgl_prefix_attn.api import wrapper as api
from sgl_prefix_attn.execute.backends.torch_backend import TorchBackend
from sgl_prefix_attn.execute.lse import Lse
from sgl_prefix_attn.records import STRATEGIES, HeadConfig
from tests.support.examples import examples
from tests.support.forests import path_table, path_tables
from tests.support.problems import assert_attention, make_problem
from tests.support.running import paths_of, plan_wrapper, planned_wrapper, wrapper
from tests.support.torch_hopper import TorchHopper, wrappers_as_on_hopper

CPU, HEADS = torch.device("cpu"), HeadConfig(8, 2, 32)


@pytest.fixture(scope="module", params=[TorchBackend, TorchHopper], autouse=True)
def backend(request):
    """What wrappers run by themselves; torch stands for the kernels."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param is TorchHopper:
            wrappers_as_on_hopper(patch)
        yield request.param


def run(made, problem):
    out, lse = made.run(problem.q, (problem.k, problem.v), return_lse=True)
    assert isinstance(lse, Lse) and lse.base == "2"
    assert_attention(problem, out, lse.values)
    return out


@given(
    path_tables(),
    st.sampled_from([HEADS, HeadConfig(28, 4, 32), HeadConfig(7, 1, 80)]),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.sampled_from(STRATEGIES),
)
@examples(60)
def test_plan_append_run(table, heads, dtype, strategy):
    problem = make_problem(table, heads, dtype)
    kernels = "auto" if strategy == "calibrated" else "portable"  # which knows the others
    made = planned_wrapper(problem, strategy=strategy, kernels=kernels)
    run(made, problem)
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        made.append(problem.grow(generator))
        run(made, problem)


@given(path_tables(lengths=(16, 32, 48)), st.sampled_from([1, 16]))
@examples(40)
def test_a_block_table_gives_the_same_plan(table, page_size):
    """Wherever the tree's nodes are whole pages and tails have different pages. Tiles follow the
    order of the nodes: of them it is what is shared that is the same."""
    problem = make_problem(table, HEADS, page_size=page_size)
    by_paths = planned_wrapper(problem)
    by_table = wrapper(HEADS, sm_scale=problem.sm_scale, page_size=page_size)
    block_table = problem.req_to_token[problem.pool][:, ::page_size] // page_size
    by_table.plan_block_table(block_table, problem.seq_lens)

    plans = [made.explain() for made in (by_table, by_paths)]
    for name in ("num_nodes", "kv_tokens_unique"):
        assert plans[0][name] == plans[1][name]
    run(by_table, problem)
    run(by_paths, problem)
    slots = problem.grow(torch.Generator().manual_seed(1))
    by_paths.append(slots)
    by_table.append(slots)
    run(by_table, problem)
    run(by_paths, problem)


def test_lengths_and_rows_may_be_lists_and_int64():
    problem = make_problem(path_table([(-1, 20)], [0, 0], [3, 4]), HEADS)
    made = wrapper(HEADS, sm_scale=problem.sm_scale)
    slots = problem.req_to_token.long()
    made.plan([[(5, 20)], [(5, 20)]], problem.seq_lens.tolist(), slots, problem.pool.tolist())
    run(made, problem)


def test_soft_cap_and_default_scale():
    problem = make_problem(path_table([(-1, 20)], [0, 0], [3, 4]), HEADS, soft_cap=5.0)
    made = wrapper(HEADS, sm_scale=problem.sm_scale, logits_soft_cap=5.0)
    made.plan([[(5, 20)]] * 2, problem.seq_lens, problem.req_to_token, problem.pool)
    run(made, problem)
    problem.soft_cap, problem.sm_scale = 0.0, 32**-0.5
    made = wrapper(HEADS)
    made.plan([[(5, 20)]] * 2, problem.seq_lens, problem.req_to_token, problem.pool)
    run(made, problem)


def test_out_is_written_in_place():
    problem = make_problem(path_table([(-1, 20)], [0, 0], [3, 4]), HEADS)
    made = planned_wrapper(problem)
    out = torch.full_like(problem.q, math.nan)
    assert made.run(problem.q, (problem.k, problem.v), out=out) is out
    assert_attention(problem, out)
    given_out, lse = made.run(problem.q, (problem.k, problem.v), out=out, return_lse=True)
    assert given_out is out and lse.values.shape == (2, HEADS.num_qo_heads)


def test_rows_begin_at_16_bytes():
    problem = make_problem(path_table([(-1, 20)], [0, 0], [3, 4]), HEADS)
    made = planned_wrapper(problem)
    size = HEADS.num_qo_heads * HEADS.head_dim
    wide, whole = torch.zeros(2, size + 2), torch.zeros(2 * size + 2)
    kv = (problem.k, problem.v)
    for q in (wide[:, :size].view(2, 8, 32), whole[2:].view(2, 8, 32)):
        q.copy_(problem.q)
        with pytest.raises(ValueError, match="q must have rows .* multiples of 16 bytes"):
            made.run(q, kv)


def test_plans_follow_each_other():
    """Larger (the workspace grows), smaller (it stays), and the slots are the plan's own."""
    made = wrapper(HEADS, sm_scale=1.5 * 32**-0.5)
    for batch in (2, 30, 3):
        problem = make_problem(path_table([(-1, 50)], [0] * batch, [9] * batch), HEADS, seed=batch)
        slots = problem.req_to_token.clone()
        made.plan(paths_of(problem.paths), problem.seq_lens, slots, problem.pool)
        slots.fill_(0)
        run(made, problem)
        made.append(problem.grow(torch.Generator().manual_seed(batch)))
        run(made, problem)


def test_lengths_stay_where_a_captured_graph_reads_them(backend, monkeypatch):
    read = []
    monkeypatch.setattr(backend, "append", lambda self, workspace, lens, slots: read.append(lens))
    made = wrapper(HEADS)
    for batch in (5, 3, 5):
        problem = make_problem(path_table([(-1, 50)], [0] * batch, [9] * batch), HEADS)
        plan_wrapper(made, problem)
        made.append(problem.last_slots(1))
    assert len(read) == 3 and len({lens.data_ptr() for lens in read}) == 1


def test_a_refused_plan_leaves_the_current_one():
    problem = make_problem(path_table([(-1, 20)], [0, 0], [3, 4]), HEADS)
    made = planned_wrapper(problem)
    made.append(problem.grow(torch.Generator().manual_seed(1)))
    other = make_problem(path_table([(-1, 30)], [0, 0, 0], [3, 4, 5]), HEADS)
    other.req_to_token[other.pool[1], 7] = 0  # a shared slot that differs
    with pytest.raises(ValueError, match="slots in req_to_token agree"):
        made.plan(paths_of(other.paths), other.seq_lens, other.req_to_token, other.pool)
    run(made, problem)
    assert made.explain()["appended"] == 1


@pytest.mark.parametrize("grows", [True, False])
def test_a_plan_without_memory_is_never_run_in_part(backend, monkeypatch, grows):
    problem = make_problem(path_table([(-1, 20)], [0, 0], [3, 4]), HEADS)
    lens = [300] * 60 if grows else [5]
    other = make_problem(path_table([(-1, 30)], [0] * len(lens), lens), HEADS)
    made = planned_wrapper(problem)

    def lacks(*_):
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as short:
        short.setattr(backend, "fill", lacks)
        with pytest.raises(torch.OutOfMemoryError):
            plan_wrapper(made, other)
    if grows:
        run(made, problem)
    else:
        with pytest.raises(RuntimeError, match="no plan yet"):
            run(made, problem)
    plan_wrapper(made, other)
    run(made, other)


def test_no_more_of_a_table_is_read_than_requests_use(backend, monkeypatch):
    problem = make_problem(path_table([(-1, 20)], [0, 0], [30, 40]), HEADS)
    filled, fill = [], backend.fill
    monkeypatch.setattr(backend, "fill", lambda *args: filled.append(args[3]) or fill(*args))
    wide = torch.full((1000, 5000), -1)
    wide[problem.pool, : problem.req_to_token.shape[1]] = problem.req_to_token[problem.pool].long()
    made = wrapper(HEADS, sm_scale=problem.sm_scale)
    made.plan(paths_of(problem.paths), problem.seq_lens, wide, problem.pool)
    run(made, problem)
    made.plan_block_table(wide[problem.pool], problem.seq_lens)
    run(made, problem)
    assert [tuple(table.shape) for table in filled] == [(2, 60), (2, 60)]


def test_nothing_is_recorded_for_gradients():
    problem = make_problem(path_table([(-1, 20)], [0, 0], [30, 40]), HEADS, torch.float32)
    made, caches = planned_wrapper(problem), (problem.k, problem.v)
    want = made.run(problem.q, caches)
    asked, out = problem.q.requires_grad_(), torch.zeros_like(want, requires_grad=True)
    sinks = torch.nn.Parameter(torch.full((HEADS.num_qo_heads,), -torch.inf))
    assert not made.run(asked, caches, sinks=sinks).requires_grad
    assert torch.equal(made.run(asked, caches, out=out), want)


def test_explain():
    problem = make_problem(path_table([(-1, 128)], [0, 0, -1], [3, 4, 7]), HEADS)
    made = planned_wrapper(problem, strategy="naive", kernels="portable")
    made.append(problem.grow(torch.Generator().manual_seed(1)))
    plan = made.explain()
    found = plan.pop("tiles")
    assert plan.pop("num_items") == sum(len(tile["parts"]) for tile in found)
    assert plan.pop("num_tiles") == len(found) and plan.pop("num_partials") > 0
    assert plan == {
        "strategy": "naive",
        "batch_size": 3,
        "appended": 1,
        "num_nodes": 1,
        "kv_tokens_read": 128 + 3 + 4 + 7,
        "kv_tokens_query_centric": 131 + 132 + 7,
        "kv_tokens_unique": 142,
    }
    (alone,) = (tile for tile in found if tile["split_off"])
    assert sorted(alone["requests"]) == [0, 1]
    assert [(run["start"], run["end"]) for run in alone["runs"]] == [(0, 128)]


def test_explain_a_merged_node():
    problem = make_problem(path_table([(-1, 128)], [0, 0], [3, 4]), HEADS)
    made = planned_wrapper(problem)
    plan = made.explain()
    assert (plan["strategy"], plan["appended"]) == ("calibrated", 0)
    (tile,) = plan["tiles"]
    assert sorted(tile["requests"]) == [0, 1] and tile["parts"]
    runs = sorted((run["start"], run["end"], run["requests"]) for run in tile["runs"])
    assert [run[:2] for run in runs] == [(0, 128), (128, 131), (128, 132)]
    assert sorted(runs[0][2]) == [0, 1] and [run[2] for run in runs[1:]] == [(0,), (1,)]


def test_slots_reach_kernels_one_after_another(backend, monkeypatch):
    """Which read them so, whatever the strides of what was given."""
    problem = make_problem(path_table([(-1, 20)], [0, 0], [30, 40]), HEADS, torch.float32)
    problem.req_to_token = problem.req_to_token.t().contiguous().t()
    assert not problem.req_to_token.is_contiguous()
    given = []
    for name in ("fill", "append"):
        call = getattr(backend, name)

        def kept(kernels, *args, call=call):
            given.extend(args[2:])
            return call(kernels, *args)

        monkeypatch.setattr(backend, name, kept)
    made = planned_wrapper(problem)
    slots = problem.grow(torch.Generator())
    made.append(torch.stack([slots, slots], 1)[:, 0])
    assert len(given) == 3 and all(x.is_contiguous() for x in given)
    run(made, problem)


def test_a_plan_of_inference_mode_goes_on_outside():
    problem = make_problem(path_table([(-1, 20)], [0, 0], [30, 40]), HEADS, torch.float32)
    with torch.inference_mode():
        made = planned_wrapper(problem)
        run(made, problem)
    made.append(problem.grow(torch.Generator()))
    run(made, problem)


def test_headroom_is_a_hard_limit():
    problem = make_problem(path_table([(-1, 20)], [0, 0], [3, 4]), HEADS, room=70)
    made = planned_wrapper(problem)
    generator = torch.Generator().manual_seed(1)
    for left in reversed(range(64)):
        made.append(problem.grow(generator))
        assert made.appends_left == left
    run(made, problem)
    with pytest.raises(RuntimeError, match="headroom of 64 tokens is full: call plan"):
        made.append(torch.tensor([1, 2]))
    run(made, problem)  # the refused append changed nothing
    made.plan(paths_of(problem.paths), problem.seq_lens, problem.req_to_token, problem.pool)
    made.append(problem.grow(generator))
    run(made, problem)


@pytest.mark.parametrize("call", ["append", "run", "explain"])
def test_before_plan(call):
    arguments = {
        "append": (torch.tensor([1]),),
        "run": (torch.zeros(1, 8, 32), (torch.zeros(2, 2, 32), torch.zeros(2, 2, 32))),
        "explain": (),
    }
    with pytest.raises(RuntimeError, match="no plan yet"):
        getattr(wrapper(HEADS), call)(*arguments[call])


def test_kernels_that_are_asked_for(backend):
    default = api.PrefixAttentionWrapper(8, 2, 32, device="cpu", dtype=torch.float32)
    assert type(default._executor.backend) is backend
    assert type(wrapper(HEADS, kernels="portable")._executor.backend) is TorchBackend
    if backend is TorchHopper:
        assert type(wrapper(HEADS, kernels="hopper")._executor.backend) is TorchHopper
        with pytest.raises(ValueError, match="strategy pat.*kernels portable"):
            wrapper(HEADS, kernels="hopper", strategy="pat")


def test_exported():
    assert sgl_prefix_attn.Lse is Lse
