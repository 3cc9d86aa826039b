"""Plans as a server runs them: planner -> policy -> executor -> attention over many steps, with
the torch interpreter of their words as the kernels."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_prefix_attn.execute.backends.torch_backend import TorchBackend
from sgl_prefix_attn.execute.executor import PlanExecutor
from sgl_prefix_attn.execute.full_attention import full_attention
from sgl_prefix_attn.execute.params import Capacity, LayerParams
from sgl_prefix_attn.metrics.counters import StepCounters
from sgl_prefix_attn.paths.radix_reader import RadixReader
from sgl_prefix_attn.paths.tree_reader import RunningBatch
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.kernel_rates import KernelRates
from sgl_prefix_attn.predict.predictor import Predictor
from sgl_prefix_attn.records import Decision, HeadConfig
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.step.policy import STOCK_STEPS
from sgl_prefix_attn.step.preparer import StepPreparer
from tests.support.calibrations import calibration
from tests.support.examples import examples
from tests.support.fake_sglang import World
from tests.support.forests import nested_paths, path_table, path_tables
from tests.support.torch_hopper import TorchHopper

HEADS = HeadConfig(8, 2, 16)
HEADROOM = 5
CPU = torch.device("cpu")
FORCED = Decision("prefix", "forced")


# torch stands for either kernel
KERNELS = pytest.mark.parametrize("kernels", [TorchBackend, TorchHopper])


def planner_of(backend, headroom, capacity):
    return backend.planner(KernelRates(), headroom=headroom, capacity=capacity)


class Server:
    """Decode steps of a fake radix tree's requests; each is compared with full attention."""

    def __init__(self, kernels=TorchBackend, policy="prefix", capacity=None, predictor=None):
        self.world, self.grown = World(columns=1024), {}
        backend = kernels(HEADS, torch.float32, CPU)
        capacity = capacity or backend.server_capacity(16, 4096, HEADROOM)
        self.executor = PlanExecutor(backend, capacity)
        self.planner = planner_of(backend, HEADROOM, capacity)
        self.steps = StepPreparer(
            Settings(policy=policy, headroom=HEADROOM),
            self.planner,
            StepCounters(),
            predictor=predictor,
        )
        generator = torch.Generator().manual_seed(0)
        self.k, self.v = torch.randn(2, 16384, HEADS.num_kv_heads, HEADS.head_dim,
                                     generator=generator)  # fmt: skip

    def add(self, tokens):
        req = self.world.add(tokens, tail=100)
        self.grown[req] = 0
        return req

    def remove(self, req):
        self.world.reqs.remove(req)

    def batch(self):
        world = self.world
        lens = [req.cache_protected_len + self.grown[req] for req in world.reqs]
        return RunningBatch(
            list(world.reqs), world.cache, np.array(lens, np.int64), world.req_to_token
        )

    def step(self):
        """One decode step of all requests; returns its decision."""
        reqs = self.world.reqs
        for req in reqs:
            self.grown[req] += 1
        batch = self.batch()
        step = self.steps.prepare(batch)
        if not step.is_prefix:
            return step.decision
        rows = torch.tensor([req.req_pool_idx for req in reqs])
        lens = torch.from_numpy(batch.seq_lens)
        table = self.world.req_to_token
        if step.new_plan is not None:
            self.executor.load(step.new_plan, table, rows)
        self.executor.append(lens, table[rows, lens - 1].long())
        q = torch.randn(len(reqs), HEADS.num_qo_heads, HEADS.head_dim)
        out = torch.full_like(q, float("nan"))
        self.executor.run(LayerParams(q, self.k, self.v, out, None, 0.3, 0.0))
        want, _ = full_attention(q, self.k, self.v, table, rows, lens, sm_scale=0.3)
        torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
        return step.decision


@KERNELS
def test_steps_that_grow_join_leave_and_replan_are_full_attention(kernels):
    server = Server(kernels)
    shared = [7] * 200
    for i in range(5):
        server.add(shared + [10 + i])
    for _ in range(HEADROOM + 1):
        assert server.step() == FORCED
    assert server.steps.counters.plans == {"first": 1}
    for _ in range(2):
        server.step()
    assert server.steps.counters.plans == {"first": 1, "headroom": 1}
    late = server.add(shared[:130] + [3] * 90)  # splits the node that all the others share
    server.step()
    lonely = server.add([])
    server.step()
    for _ in range(2 * HEADROOM):
        server.step()
    for gone in (late, lonely, server.world.reqs[0]):
        server.remove(gone)
        server.step()
    plans = server.steps.counters.plans
    assert plans == {"first": 1, "composition": 5, "headroom": 2}
    assert set(server.steps.counters.steps) == {FORCED}


def test_what_a_step_reads_is_counted():
    server = Server()
    for i in range(4):
        server.add([0] * 128 + [1 + i])
    server.step()
    server.step()
    assert server.steps.counters.kv_tokens == {
        "read": 2 * (128 + 4) + 4 + 8,
        "query_centric": 4 * (2 * 129) + 4 + 8,
        "unique": 2 * (128 + 4) + 4 + 8,
    }


@pytest.mark.parametrize(("stock_us", "variant"), [(1e6, "prefix"), (1e-3, "stock")])
def test_the_policy_compares_the_planners_time_with_the_stock_kernels(stock_us, variant):
    predictor = Predictor(calibration())
    predictor.stock = lambda seq_lens, unique, query_lens: stock_us
    server = Server(policy="auto", predictor=predictor)
    for i in range(4):
        server.add([0] * 128 + [1 + i])
    decision = server.step()
    assert decision.variant == variant
    assert decision.predicted.stock_us == stock_us
    plan = server.planner.plan(RadixReader().read_paths(server.batch()))
    assert decision.predicted.prefix_us == plan.predicted_us


def test_a_plan_that_does_not_fit_is_stock_steps_counted():
    server = Server(capacity=Capacity(4096, 64 * 20, 64))
    for i in range(3):
        server.add([i] * 600)
    decisions = [server.step() for _ in range(STOCK_STEPS + 1)]
    assert set(decisions) == {Decision("stock", "plan_too_large")}
    server.remove(server.world.reqs[0])
    server.remove(server.world.reqs[0])
    decisions = [server.step() for _ in range(STOCK_STEPS)]
    assert decisions[-1] == FORCED


@KERNELS
@given(path_tables(max_batch=60, max_nodes=20), st.sampled_from([1, 5, 64]))
@examples(100)
def test_a_server_has_room_for_every_batch_of_its_size(kernels, paths, headroom):
    """In the widest tiles at the least: requests and KV tokens are at their limit."""
    for heads in (HEADS, HeadConfig(16, 1, 16), HeadConfig(2, 2, 16)):
        backend = kernels(heads, torch.float16, CPU)
        tokens = build_forest(paths).unique_tokens
        capacity = backend.server_capacity(paths.leaf.size, tokens, headroom)
        assert capacity.covers(planner_of(backend, headroom, capacity).plan(paths))


@KERNELS
@pytest.mark.parametrize("heads", [HeadConfig(32, 8, 128), HeadConfig(16, 1, 128)], ids=str)
@pytest.mark.parametrize("length", [16, 64])
def test_prompts_that_are_each_a_prefix_of_the_next_fit(length, heads, kernels):
    """Nodes that all requests of a tile see are one run of it, however many there are above."""
    paths = nested_paths(1024, length)
    backend = kernels(heads, torch.float16, CPU)
    capacity = backend.server_capacity(1024, build_forest(paths).unique_tokens, 64)
    assert capacity.covers(planner_of(backend, 64, capacity).plan(paths))


@KERNELS
@pytest.mark.parametrize("heads", [HeadConfig(32, 8, 128), HeadConfig(16, 1, 128)], ids=str)
def test_a_long_prefix_that_many_tiles_read_fits_a_small_pool(heads, kernels):
    paths = path_table([(-1, 30000)], [0] * 1024, [16] * 1024)
    backend = kernels(heads, torch.float16, CPU)
    capacity = backend.server_capacity(1024, build_forest(paths).unique_tokens, 64)
    assert capacity.covers(planner_of(backend, 64, capacity).plan(paths))
    assert capacity.index_slots < 1.1 * (1 << 23), "as many as are read, and an item's own"
