"""Every oracle of an attention output finds every planted fault, and passes what is right."""

from types import SimpleNamespace

import pytest
import torch

from eval.compare_outputs.dump import LayerDump
from eval.compare_outputs.layer_judgement import judge
from sgl_prefix_attn.engine.cross_check import check_layer
from sgl_prefix_attn.execute.backends.torch_backend import TorchBackend
from sgl_prefix_attn.execute.self_test import check_kernels, self_test_paths
from sgl_prefix_attn.metrics.counters import StepCounters
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.records import HeadConfig
from tests.support.gpu_problems import TREES
from tests.support.output_faults import FAULTS, planted, right
from tests.support.problems import Problem, assert_attention, make_problem, plain_attention

HALVES = [torch.bfloat16, torch.float16]
HEADS = HeadConfig(8, 2, 64)
CASES = [
    ("mixed", HEADS), ("one_root_long", HEADS), ("lengths_1_63_4097", HeadConfig(7, 1, 128)),
]  # fmt: skip


def by_full_attention(problem, out) -> bool:
    try:
        assert_attention(problem, out)
    except AssertionError:
        return False
    return True


def by_stock(problem, out) -> bool:
    stock, _ = plain_attention(problem, problem.dtype)
    layer = SimpleNamespace(
        layer_id=0, tp_q_head_num=problem.heads.num_qo_heads, v_head_dim=problem.heads.head_dim
    )
    counters = StepCounters()
    check_layer(layer, out.flatten(1), stock.flatten(1), counters)
    return counters.mismatches == 0


def by_layer_dump(problem, out) -> bool:
    index = problem.req_to_token[problem.pool].long()
    dump = LayerDump(
        q=problem.q, out=out, k=problem.k, v=problem.v, index=index, seq_lens=problem.seq_lens,
        sm_scale=problem.sm_scale, replayed=False, decision=None,
    )  # fmt: skip
    return judge(dump)[2] is None


ORACLES = {oracle.__name__: oracle for oracle in (by_full_attention, by_stock, by_layer_dump)}


@pytest.fixture(scope="module", params=HALVES, ids=str)
def dtype(request):
    return request.param


@pytest.fixture(scope="module", params=CASES, ids=[tree for tree, _ in CASES])
def problems(request, dtype) -> list[Problem]:
    """The shortest request of a tree with its two longest, and with two of 17 to 64 tokens."""
    tree, heads = request.param
    problem = make_problem(TREES[tree](), heads, dtype)
    order = problem.seq_lens.argsort().tolist()
    few = [row for row in order if 17 <= problem.seq_lens[row] <= 64]
    pairs = [order[-2:], *([few[-2:]] if len(few) > 1 else [])]
    return [problem.of_rows([order[0], *pair]) for pair in pairs]


@pytest.mark.parametrize("passes", ORACLES.values(), ids=ORACLES)
def test_each_fault_is_found(passes, problems):
    applied = set()
    for problem in problems:
        assert passes(problem, right(problem))
        assert passes(problem, plain_attention(problem, problem.dtype)[0])
        for fault in FAULTS:
            out = planted(problem, fault)
            if out is not None:
                applied.add(fault)
                assert not passes(problem, out), (fault, problem.seq_lens)
    assert len(applied) >= len(FAULTS) - 2  # not every tree has requests of few tokens


class Planting(TorchBackend):
    """Writes a fault's outputs, or with None what is right."""

    fault: str | None = None

    def fill(self, workspace, plan, req_to_token, req_pool_indices):
        self.rows = req_to_token, req_pool_indices
        super().fill(workspace, plan, req_to_token, req_pool_indices)

    def append(self, workspace, seq_lens, out_cache_loc):
        self.seq_lens = seq_lens
        super().append(workspace, seq_lens, out_cache_loc)

    def forward(self, workspace, layer):
        problem = Problem(
            self_test_paths(), self.heads, layer.q.dtype, layer.soft_cap, layer.sm_scale, layer.q,
            layer.k_cache, layer.v_cache, *self.rows, self.seq_lens,
        )  # fmt: skip
        layer.out[:] = planted(problem, self.fault) if self.fault else right(problem)


def test_the_self_test_finds_each_fault(dtype):
    heads, device = HEADS, torch.device("cpu")
    backend = Planting(heads, dtype, device)
    planner = Planner(heads, num_sms=16, headroom=2, tile_rows=backend.tile_rows)
    plan = planner.plan(self_test_paths())
    check_kernels(backend, [plan], 0.0)
    for fault in set(FAULTS) - {"one_token_of_64_dropped", "a_column_too_many"}:
        backend.fault = fault  # the self-test has no request of few tokens
        with pytest.raises(RuntimeError, match=r"off full attention: row [012]\b"):
            check_kernels(backend, [plan], 0.0)
