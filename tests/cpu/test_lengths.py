"""Rounds of speculative decoding whose lengths the host does not know exactly: they are decided but
not planned, on all tensor-parallel ranks alike."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sgl_prefix_attn.engine.asked_tokens import committed
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.records import Decision, HeadConfig
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.step.policy import LENGTHS_AWAITED, STOCK_STEPS
from tests.cpu.test_extend import preparer as extend_preparer
from tests.support.fake_sglang import LMCRadixCache
from tests.support.steps import Failing, Times, preparer, shared_world

DEFAULT, ERROR = Decision("prefix", "default"), Decision("stock", "planner_error")
TOKENS = 3  # that a round verifies
HANG_S = 60  # a rank that waits so long for the other one's word waits for ever


class Rounds:
    """A preparer, and requests that share a prefix."""

    def __init__(self, steps):
        self.steps, self.world = steps, shared_world()

    @property
    def needs_lengths(self):
        return self.steps.needs_lengths


class Drafting(Rounds):
    """A StepPreparer, asked as PlannedDrafts asks it."""

    def round(self, accepted, exact=True, cache=None):
        """The decision for requests that have accepted so many tokens, two more than the host knows
        where it does not know them exactly."""
        if (standing := self.steps.pass_over()) is not None:
            return standing
        batch = self.world.batch(accepted + 1 if exact else accepted - 1, cache)
        self.steps.lengths_jumped(batch.seq_lens)
        step = self.steps.prepare(batch._replace(is_exact=exact))
        assert step.is_prefix == (step.new_plan is not None)
        return step.decision


class Verifying(Rounds):
    """An ExtendPreparer, asked as Extends asks it."""

    def round(self, accepted, exact=True, against=None, cache=None):
        if (standing := self.steps.pass_over()) is not None:
            return standing
        batch = self.world.batch(accepted + TOKENS - (0 if exact else 2), cache)
        lens = np.full(4, TOKENS, np.int32)
        step = self.steps.prepare(batch._replace(is_exact=exact), lens, against, verifies=True)
        assert step.is_prefix == (step.new_plan is not None)
        return step.decision

    def unread(self):
        """A round of which this rank cannot tell what it asks."""
        if self.steps.pass_over() is None:
            cache = self.world.batch(1).tree_cache
            self.steps.unreadable(ValueError("a draft of an unknown kind"), True, cache)


class FailingTiles(Failing):
    """The same for batches that verify."""

    def __init__(self, *failing_calls):
        super().__init__(*failing_calls)
        self.planner = Planner(HeadConfig(8, 2, 32), num_sms=16)
        self.tile_queries = self.planner.tile_queries


def drafting(fails=(), **options):
    return Drafting(preparer(plan_with=Failing(*fails), **options))


def verifying(fails=(), **options):
    return Verifying(extend_preparer(planner=FailingTiles(*fails), **options))


@pytest.mark.parametrize("start", [drafting, verifying])
def test_a_plan_that_must_wait_for_lengths_runs_from_the_next_round_on(start):
    rounds = start()
    assert not rounds.needs_lengths
    assert rounds.round(3, exact=False) == LENGTHS_AWAITED and rounds.needs_lengths
    assert rounds.round(5) == DEFAULT and rounds.needs_lengths


def test_a_plan_that_was_not_loaded_is_not_gone_on_with():
    steps, world = preparer(), shared_world()
    assert steps.prepare(world.batch(3)._replace(is_exact=False)).decision == LENGTHS_AWAITED
    assert steps.prepare(world.batch(4)).new_plan is not None


def test_where_nobody_waited_lengths_are_those_of_processed_results():
    unknown, reqs = SimpleNamespace(seq_lens_cpu=None), shared_world().reqs
    lens, is_exact = committed(unknown, reqs)
    assert lens.tolist() == [req.seqlen for req in reqs] and not is_exact
    lens, is_exact = committed(SimpleNamespace(seq_lens_cpu=torch.tensor([7, 8])), reqs)
    assert lens.tolist() == [7, 8] and is_exact


def test_a_round_that_waits_counts_as_stock_but_holds_nothing():
    """A gain of 3 % would not be enough to leave stock kernels that have just begun."""
    rounds = Drafting(preparer(predictor=Times(stock=1.03, prefix=1.0)))
    assert rounds.round(3, exact=False) == LENGTHS_AWAITED
    assert rounds.round(4).reason == "predicted_faster"
    tokens, steps = rounds.steps.counters.kv_tokens, rounds.steps.counters.steps
    assert steps[LENGTHS_AWAITED] == 1 and tokens["query_centric"] - tokens["read"] == 3 * 40


@pytest.mark.parametrize("start", [drafting, verifying])
@pytest.mark.parametrize("policy", ["auto", "prefix"])
def test_what_cannot_run_a_plan_waits_for_no_lengths(start, policy):
    settings = Settings(policy=policy)
    rounds = start(settings=settings)
    rounds.round(3)
    assert rounds.needs_lengths
    assert not rounds.round(5, cache=LMCRadixCache()).variant == "prefix"
    assert not rounds.needs_lengths
    failing = start(settings=settings, fails=range(2, 99))
    failing.round(3)
    assert failing.round(5) == ERROR and not failing.needs_lengths


def test_neither_do_drafts_of_batches_without_a_prefix_graph():
    rounds = drafting(graph_problem=lambda size: "graph_batch_size" if size > 3 else None)
    gone = rounds.world.reqs.pop()
    assert rounds.round(3) == DEFAULT and rounds.needs_lengths
    rounds.world.reqs.append(gone)
    assert rounds.round(5).reason == "graph_batch_size" and not rounds.needs_lengths


def test_neither_do_chains_that_are_none_or_cannot_be_told():
    rounds = verifying()
    rounds.round(3)
    assert rounds.round(5, against="verify_tree").reason == "verify_tree"
    assert not rounds.needs_lengths
    rounds = verifying()
    rounds.round(3)
    rounds.unread()
    assert not rounds.needs_lengths


# --- two ranks ------------------------------------------------------------------------------------


class Ranks:
    """Two ranks that wait for each other's word, as in a collective."""

    def __init__(self):
        self.barrier, self.words = Barrier(2), {}

    def agree(self, rank):
        def agree(ok):
            self.words[rank] = ok
            self.barrier.wait(timeout=HANG_S)
            both = all(self.words.values())
            self.barrier.wait(timeout=HANG_S)
            return both

        return agree


class Border:
    """Predicts that drafts of longer requests gain by a plan."""

    source = "measured"

    def stock(self, seq_lens, unique, query_lens=None):
        return 1e4 if seq_lens.max() > 41 + 27 else 1.0

    def prefix(self, plan):
        return 1e3


@pytest.mark.parametrize("fails", [1, 2, 3])
@pytest.mark.parametrize(
    ("start", "options"), [(drafting, {}), (drafting, {"predictor": Border()}), (verifying, {})]
)
def test_a_fault_of_one_rank_leaves_the_other_at_its_side(start, options, fails):
    """Same kernels in each round, with lengths known where a rank has asked for them; and plans run
    again."""
    start(**options).round(2)  # compiles the planner, which one rank must not wait for
    ranks = Ranks()
    pair = [
        start(fails=() if rank == 0 else (fails,), agree=ranks.agree(rank), **options)
        for rank in range(2)
    ]
    with ThreadPoolExecutor(2) as pool:
        for i in range(4 * STOCK_STEPS):
            needs = [one.needs_lengths for one in pair]
            assert needs[0] == needs[1]
            for one in pair if i % STOCK_STEPS == 0 else ():
                one.world.reqs.reverse()  # another batch is evaluated again
            asked = [pool.submit(one.round, 3 * i + 2, one.needs_lengths) for one in pair]
            variants = [one.result(timeout=2 * HANG_S).variant for one in asked]
            assert variants[0] == variants[1]
    assert variants == ["prefix", "prefix"]


@pytest.mark.parametrize("against", [None, "verify_tree"])
def test_so_does_a_batch_that_one_rank_cannot_read(against):
    verifying().round(2)
    ranks = Ranks()
    pair = [verifying(agree=ranks.agree(rank)) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(pair[0].round, 1, against=against), pool.submit(pair[1].unread)]
        assert asked[0].result(timeout=2 * HANG_S).variant == "stock"
        asked[1].result(timeout=2 * HANG_S)
        for left in range(STOCK_STEPS - 1, -1, -1):
            asked = [pool.submit(one.round, 2) for one in pair]
            variants = {one.result(timeout=2 * HANG_S).variant for one in asked}
            assert variants == {"stock" if left else "prefix"}
