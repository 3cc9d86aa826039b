"""Plans of verify steps while lengths move by what was accepted: what else may change between two
steps, one thing at a time, eagerly and in SGLang's decode graphs.

KV that a correct plan does not read is NaN: tokens that were rejected, and slots given back.
"""

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.records import Decision
from sgl_prefix_attn.step.policy import LENGTHS_AWAITED, STOCK_STEPS
from tests.sglang.fake_server import Server, speculate
from tests.sglang.test_verify import PREFIX, VerifyRunner, eager, expected, verify_batch

SHARED = 40  # tokens of the node that all requests are below


class Chains:
    """Three requests that verify step by step; grown [B]: tokens of each beyond the cached ones."""

    def __init__(self, monkeypatch, in_graphs: bool):
        speculate(monkeypatch)
        self.server = Server(monkeypatch, prefill="prefix")
        self.world, self.pool = self.server.world, self.server.runner.token_to_kv_pool
        self.runner = VerifyRunner(self.server) if in_graphs else None
        if self.runner:
            self.runner.capture()
        self.grown = torch.ones(3, dtype=torch.int64)

    def poison(self, slots) -> None:
        self.pool.k[slots.long()] = self.pool.v[slots.long()] = float("nan")

    def step(self, accepted=(1, 4, 2, 3)):
        """Verify, compare with attention to all tokens of each request, and accept so many."""
        batch = verify_batch(self.server, self.grown)
        for row, length in zip(batch.req_pool_indices, batch.seq_lens, strict=True):
            self.poison(self.world.req_to_token[row, length : length + 30])
        stock = len(self.server.stock.calls)
        if self.runner:
            batch, q, out, replayed = self.runner.verify(self.grown)
            assert replayed and self.runner._replay_graph_key.variant_label == "prefix"
        else:
            q, out = eager(self.server, batch)
        torch.testing.assert_close(out, expected(self.server, q, batch), rtol=1e-5, atol=1e-5)
        assert len(self.server.stock.calls) == stock
        self.grown += torch.tensor(accepted[: len(self.grown)])

    def attend_unobserved(self, batch) -> list[str]:
        """What the stock backend is asked for a batch whose requests SGLang did not show."""
        before = len(self.server.stock.calls)
        if self.runner:
            self.runner.step(batch)
        else:
            self.server.backend.init_forward_metadata(batch)
            self.server.backend.forward_extend(
                *(x[: len(batch.out_cache_loc)] for x in QKV), self.server.layer, batch
            )
        return self.server.stock.calls[before:]

    def batch(self):
        return (self.runner.live if self.runner else lambda n: verify_batch(self.server, n))(
            self.grown
        )


QKV = torch.zeros(16, 4, 8).flatten(1), torch.zeros(16, 2, 8), torch.zeros(16, 2, 8)
STOCK_CALLS = {False: ["metadata", "extend"], True: ["out_graph", "in_graph", "extend"]}


@pytest.fixture(params=[False, True], ids=["eager", "graphs"])
def in_graphs(request):
    return request.param


@pytest.fixture
def chains(monkeypatch, in_graphs):
    made = Chains(monkeypatch, in_graphs)
    made.step()
    return made


def test_each_request_accepts_as_many_as_it_will(chains):
    for accepted in ((3, 1, 4), (4, 4, 1), (1, 1, 1), (2, 3, 4)):
        chains.step(accepted)
    assert chains.server.backend.counters.extends == {PREFIX: 5}


def test_other_requests_and_another_order(chains):
    reqs = chains.world.reqs
    reqs.reverse()
    chains.grown = chains.grown.flip(0)
    chains.step()
    gone, chains.grown = reqs.pop(1), chains.grown[[0, 2]].clone()
    chains.step()
    reqs.append(gone)
    chains.grown = torch.cat([chains.grown, torch.tensor([7])])
    chains.step()


def test_other_requests_of_the_same_lengths(chains):
    chains.step(accepted=(0, 0, 0))  # all of them leave, so it does not matter how many
    world, lens = chains.world, SHARED + 1 + chains.grown
    del world.reqs[:]
    for i in range(3):  # on the rows of those before, below a shorter node
        world.add([7] * 20 + [50 + i], tail=50)
    chains.grown = lens - 21
    chains.step()


def test_other_slots_for_the_same_requests(chains):
    """SGLang maps requests to slots that hold the same tokens, and gives theirs back."""
    before = chains.world.req_to_token[:3, :SHARED].clone()
    after = torch.arange(900, 900 + SHARED, dtype=torch.int32)
    chains.world.req_to_token[:3, :SHARED] = after
    chains.world.nodes()[chains.world.reqs[0].last_node.parent.id].value = after.long()
    chains.poison(before[0])
    chains.step()


def test_another_path_to_the_same_slots(chains):
    """A newcomer splits the node that all share, and verifies with them from the next step on."""
    chains.world.add([0] * 20 + [9], tail=30)
    chains.grown = torch.cat([chains.grown, torch.tensor([2])])
    chains.step()
    chains.step()


def test_another_path_for_one_of_the_same_requests(chains):
    """It was retracted, and found less of its prompt in the tree than before."""
    world = chains.world
    world.add([0] * 20 + [9])
    world.reqs.pop()  # who split the node is gone
    retracted = world.reqs[2]
    retracted.last_node = retracted.last_node.parent.parent
    chains.grown[2] += retracted.cache_protected_len - 20
    retracted.cache_protected_len = 20
    world.req_to_token[2, 20:90] = torch.arange(900, 970)
    chains.step()


def test_steps_of_other_kinds_between(chains):
    for mode in (ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.IDLE):
        between = chains.server.batch(3, mode)
        between.extend_seq_lens_cpu = [1, 1, 1]
        chains.server.observe(between)
        chains.step()


def test_a_capture_between(chains):
    if chains.runner is None:
        chains.runner = VerifyRunner(chains.server)
    chains.runner.backend.graphs.clear()
    chains.server.observe(chains.batch())
    chains.runner.capture()
    assert chains.attend_unobserved(chains.runner.live(chains.grown)) == STOCK_CALLS[True]
    chains.step()


def test_a_plan_is_not_for_a_batch_that_was_not_observed(chains, in_graphs):
    assert chains.attend_unobserved(chains.batch()) == STOCK_CALLS[in_graphs]
    chains.step()


def test_a_plan_is_not_for_a_batch_whose_lengths_the_host_lacks(chains, in_graphs):
    """SGLang copies them to the host, after what was accepted is known, for backends that ask."""
    assert chains.server.backend.needs_cpu_seq_lens
    chains.server.observe(chains.batch())  # that never runs
    unknown = chains.batch()
    unknown.seq_lens_cpu = None
    chains.server.observe(unknown)
    unknown.seq_lens_cpu = unknown.seq_lens  # for SGLang's runner
    assert chains.attend_unobserved(unknown) == STOCK_CALLS[in_graphs]
    chains.step()
    assert chains.server.backend.counters.extends == {PREFIX: 3, LENGTHS_AWAITED: 1}


def test_steps_are_stock_for_a_while_after_one_that_could_not_be_planned(
    chains, in_graphs, monkeypatch
):
    with monkeypatch.context() as patched:
        patched.setattr(Planner, "plan_forest", lambda *_: 1 / 0)
        batch = chains.batch()
        chains.server.observe(batch)
    assert chains.attend_unobserved(batch) == STOCK_CALLS[in_graphs]
    for _ in range(STOCK_STEPS - 1):  # nothing is accepted: the fake stock backend writes no KV
        chains.server.observe(batch := chains.batch())
        assert chains.attend_unobserved(batch) == STOCK_CALLS[in_graphs]
    chains.step()
    failed = Decision("stock", "planner_error")
    assert chains.server.backend.counters.extends == {PREFIX: 2, failed: STOCK_STEPS}
