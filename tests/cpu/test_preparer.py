"""Step preparation: counts, causes, faults that become stock steps, check mode."""

import gc
import logging
import weakref
from collections import Counter

import numpy as np
import pytest

from sgl_prefix_attn.execute.params import Capacity
from sgl_prefix_attn.paths.radix_reader import RadixReader
from sgl_prefix_attn.paths.tree_reader import KvMapping
from sgl_prefix_attn.plan.aligned_search import AlignedSearch
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.records import Decision, Prediction
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.step.policy import HOLD_STEPS, STOCK_STEPS
from tests.support.fake_sglang import LMCRadixCache, World
from tests.support.steps import HEADS, Failing, Times, planner, preparer, run, shared_world

DEFAULT, ERROR = Decision("prefix", "default"), Decision("stock", "planner_error")


@pytest.fixture
def world():
    return shared_world()


def test_requests_are_let_go_of_where_no_step_can_run_a_plan_any_more(world):
    steps = preparer()
    assert run(steps, world, 1).is_prefix
    planned = [weakref.ref(req) for req in world.reqs]
    steps.only_stock("kernel_error")
    other = shared_world()
    assert run(steps, other, 1).decision == Decision("stock", "kernel_error")
    world.reqs.clear()
    gc.collect()
    assert not any(req() for req in planned)


def test_plans_once_and_counts_every_step(world):
    steps = preparer()
    first, second = run(steps, world, 1), run(steps, world, 2)
    assert first.is_prefix and first.new_plan is not None
    assert second.is_prefix and second.new_plan is None
    assert steps.counters.plans == Counter(first=1)
    assert steps.counters.steps == {DEFAULT: 2}
    # 4 requests, 40 shared and 2 (then 3) private tokens each.
    read = 40 + 4 * 2 + 40 + 4 * 3
    query_centric = 4 * 42 + 4 * 43
    counted = {"read": read, "query_centric": query_centric, "unique": read}
    assert steps.counters.kv_tokens == counted
    world.reqs.pop()
    run(steps, world, 3)
    assert steps.counters.kv_tokens["read"] == read + 40 + 3 * 4, "those of another plan"


def test_replans_by_cause(world):
    steps = preparer(Settings(headroom=2))
    for grown in (1, 2, 3, 4):
        run(steps, world, grown)
    run(steps, world, 9)
    world.reqs.pop()
    run(steps, world, 10)
    assert steps.counters.plans == Counter(first=1, headroom=1, lengths=1, composition=1)


def test_a_forced_policy_and_an_unsupported_tree_or_model_are_stock_steps(world):
    forced = preparer(Settings(policy="stock"))
    assert run(forced, world, 1).decision == Decision("stock", "forced")
    other = preparer()
    assert run(other, world, 1, LMCRadixCache()).decision == Decision("stock", "tree:LMCRadixCache")
    other.only_stock("layer_option:sinks")
    assert run(other, world, 1).decision == Decision("stock", "layer_option:sinks")
    assert other.counters.kv_tokens["read"] == other.counters.kv_tokens["query_centric"] == 8 * 42
    assert not other.counters.plans


def test_beams_without_a_request_are_stock_steps_and_end_the_plan(world):
    steps = preparer()
    assert run(steps, world, 1).new_plan is not None
    batch = world.batch(2)
    beams = np.concatenate([batch.seq_lens, batch.seq_lens[:1], batch.seq_lens[:1]])
    decision = steps.prepare(batch._replace(seq_lens=beams)).decision
    assert decision == Decision("stock", "beam_search")
    assert run(steps, world, 3).new_plan is not None, "slots were remapped"


def test_the_graphs_decide_by_the_size_of_the_batch(world):
    steps = preparer(graph_problem=lambda size: "graph_batch_size" if size > 3 else None)
    assert run(steps, world, 1).decision == Decision("stock", "graph_batch_size")
    gone = world.reqs.pop()
    assert run(steps, world, 2).decision == DEFAULT
    world.reqs.append(gone)
    assert run(steps, world, 3).decision == Decision("stock", "graph_batch_size")
    world.reqs.remove(gone)
    assert run(steps, world, 3).decision == DEFAULT, "no batch lends its decision to another"


def test_a_planner_error_is_some_stock_steps_counted_and_logged_once(world, caplog):
    failing = Failing(1, 2)
    steps = preparer(plan_with=failing)
    with caplog.at_level(logging.ERROR):
        decisions = [run(steps, world, 1 + i).decision for i in range(2 * STOCK_STEPS + 2)]
    assert decisions == [ERROR] * 2 * STOCK_STEPS + [DEFAULT] * 2
    assert failing.calls == 3, "a plan that fails is not made every step"
    assert len([r for r in caplog.records if "planner_error" in r.getMessage()]) == 1
    assert steps.counters.steps == {ERROR: 2 * STOCK_STEPS, DEFAULT: 2}
    assert set(steps.counters.plan_seconds) == {"failed", "planned"}


def stock_until_the_next_look(steps, world, grown):
    """After a step that failed; returns how many tokens the next step's requests have."""
    for i in range(STOCK_STEPS - 1):
        assert not run(steps, world, grown + i).is_prefix
    return grown + STOCK_STEPS - 1


def test_a_failed_check_of_the_lifetime_is_a_stock_step_on_all_ranks(world, monkeypatch):
    ranks = Ranks()
    steps = preparer(agree=ranks)
    run(steps, world, 1)
    world.reqs.pop()  # the loaded plan holds for another batch
    with monkeypatch.context() as patched:
        patched.setattr(steps.lifetime, "stale", lambda *_: 1 / 0)
        assert run(steps, world, 2).decision == ERROR
    assert ranks.told == [True, False]
    assert run(steps, world, stock_until_the_next_look(steps, world, 3)).new_plan is not None
    assert steps.counters.plans == {"first": 1, "fault": 1}


def test_a_failed_replan_does_not_revive_the_plan_before(world):
    steps = preparer(plan_with=Failing(2))
    run(steps, world, 1)
    gone = world.reqs.pop()
    assert run(steps, world, 2).decision == ERROR
    stock_until_the_next_look(steps, world, 3)
    world.reqs.append(gone)
    # The batch that the loaded plan was made for is back, one token behind.
    again = run(steps, world, 2)
    assert again.is_prefix and again.new_plan is not None
    assert steps.counters.plans == {"first": 1, "composition": 1}, "the cause of the failed one"


class Ranks:
    """Stands for the other tensor-parallel ranks: what they say, and what this one told them."""

    def __init__(self, *others):
        self.others, self.told = list(others), []

    def __call__(self, ok):
        self.told.append(ok)
        return ok and (self.others.pop(0) if self.others else True)


def test_a_planner_error_on_one_rank_is_a_stock_step_on_all(world):
    here, there = Ranks(), Ranks(False)
    failing = preparer(plan_with=Failing(1), agree=here)
    other = preparer(agree=there)
    assert run(failing, world, 1).decision == ERROR
    assert run(other, world, 1).decision == Decision("stock", "other_rank")
    assert here.told == [False] and there.told == [True]
    # The next look plans anew on both, though the other rank's first plan was good.
    for steps in (failing, other):
        assert run(steps, world, stock_until_the_next_look(steps, world, 2)).new_plan is not None
    assert here.told == [False, True] and there.told == [True, True]


def test_ranks_talk_only_when_the_batch_was_looked_at(world):
    ranks = Ranks()
    steps = preparer(agree=ranks)
    for grown in (1, 2, 3):
        run(steps, world, grown)
    world.reqs.pop()
    run(steps, world, 4)
    assert ranks.told == [True, True]
    checking = preparer(Settings(check=True), agree=Ranks(True, False))
    assert run(checking, world, 1).is_prefix
    assert run(checking, world, 2).decision == Decision("stock", "other_rank"), "every step"


def test_a_plan_that_does_not_fit_is_a_stock_step_on_every_rank(world):
    small = Capacity(words=10_000, index_slots=16, partials=100)
    steps = preparer(capacity=small)
    assert run(steps, world, 1).decision == Decision("stock", "plan_too_large")
    assert set(steps.counters.plan_seconds) == {"failed"}
    assert not steps.counters.plans and steps.counters.last_plan is None, "nothing ran by it"


def test_check_mode_verifies_every_step_and_names_the_place(world, caplog):
    steps = preparer(Settings(check=True))
    assert run(steps, world, 1).is_prefix
    world.req_to_token[2, 7] += 1  # after planning: only a check of each step can see it
    with caplog.at_level(logging.ERROR):
        assert run(steps, world, 2).decision == Decision("stock", "check_failed")
    assert "request r2" in caplog.text and "position 7" in caplog.text
    world.req_to_token[2, 7] -= 1
    assert run(steps, world, 3).new_plan is not None, "the failed step was not appended"


def test_check_mode_verifies_paths_of_a_single_node():
    world = World()
    for _ in range(2):
        world.add([0] * 8, tail=20)
    world.req_to_token[1, 7] += 1
    decision = run(preparer(Settings(check=True)), world, 1).decision
    assert decision == Decision("stock", "check_failed")


def test_cross_checks_every_nth_prefix_step(world):
    steps = preparer(Settings(check=True, check_every=3))
    assert [run(steps, world, g).cross_check for g in range(1, 7)] == [False, False, True] * 2
    steps = preparer(Settings(check=False, check_every=1))
    assert not run(steps, world, 1).cross_check


def test_a_steady_step_neither_reads_the_tree_nor_plans(world, monkeypatch):
    steps = preparer(plan_with=planner(headroom=100))
    run(steps, world, 1)
    monkeypatch.setattr(RadixReader, "read_paths", lambda *_: 1 / 0)  # would be a stock step
    for grown in range(2, 102):
        step = run(steps, world, grown)
        assert step.is_prefix and step.new_plan is None
    assert steps.counters.steps == {DEFAULT: 101}


def test_requests_that_have_grown_are_planned_anew_on_the_paths_they_had(world, monkeypatch):
    steps, read = preparer(plan_with=planner(headroom=1)), preparer(plan_with=planner(headroom=1))
    for grown in (1, 2):
        run(steps, world, grown)
    mapping, compared = KvMapping.of, []
    with monkeypatch.context() as patched:
        patched.setattr(RadixReader, "read_paths", lambda *_: 1 / 0)  # would be a stock step
        patched.setattr(KvMapping, "of", lambda *a: compared.append(a) or mapping(*a))
        again = run(steps, world, 3)
    assert len(compared) == 1, "by the lifetime alone"
    assert steps.counters.plans == {"first": 1, "headroom": 1}
    assert np.array_equal(again.new_plan.words, run(read, world, 3).new_plan.words)


def test_tiles_of_a_plan_that_ended_early_are_kept_for_the_same_requests(world, monkeypatch):
    """Of an aligned plan, when requests of 96 tokens begin to have two parts of 64, and one will
    soon."""

    def step(grown):
        batch = world.batch(grown)
        batch.seq_lens[0] -= 10
        steps.prepare(batch)

    steps, candidates = preparer(plan_with=Planner(HEADS, num_sms=16, part_tokens=64)), []
    search = AlignedSearch.candidates
    monkeypatch.setattr(AlignedSearch, "candidates", lambda *a: candidates.append(a) or search(*a))
    for grown in range(53, 58):
        step(grown)
    assert steps.counters.plans == {"first": 1, "headroom": 1}
    assert len(candidates) == 1
    world.reqs.pop()
    step(58)
    assert len(candidates) == 2


def test_a_plan_that_failed_for_grown_requests_is_made_for_those_that_are_there_then(world):
    steps = preparer(plan_with=Failing(2, headroom=1))
    for grown in (1, 2):
        run(steps, world, grown)
    assert run(steps, world, 3).decision == ERROR
    left = stock_until_the_next_look(steps, world, 4)
    world.reqs.pop()
    again = run(steps, world, left)
    assert again.new_plan.batch_size == len(world.reqs)


SLOWER, FASTER = Decision("stock", "predicted_slower"), Decision("prefix", "predicted_faster")


def test_the_predicted_times_choose(world):
    times = Times(stock=30.0, prefix=20.0)
    steps = preparer(predictor=times, padded_size=lambda batch: 8)
    first = run(steps, world, 1)
    assert first.decision == FASTER and first.new_plan is not None
    assert first.decision.predicted == Prediction(30.0, 20.0)
    # Lengths with the graph's padding rows; 40 shared tokens counted once.
    assert times.asked == [([42] * 4 + [1] * 4, 40 + 4 * 2)]
    assert run(steps, world, 2).new_plan is None and len(times.asked) == 1, "a steady step"
    world.reqs.pop()
    assert run(steps, world, 3).new_plan is not None and len(times.asked) == 2, "another batch"


def test_a_plan_of_one_round_must_be_worth_making(world):
    times = Times(stock=30.0, prefix=20.0)
    assert run(preparer(predictor=times, least_saving_us=10.0), world, 1).decision == FASTER
    step = run(preparer(predictor=times, least_saving_us=10.1), world, 1)
    assert step.decision == Decision("stock", "saves_too_little") and step.new_plan is None


def test_steps_are_passed_over_while_a_decision_for_stock_kernels_stands(world):
    times = Times(stock=10.0, prefix=20.0)
    steps = preparer(predictor=times)
    assert steps.pass_over() is None, "nothing is known"
    for _ in range(2):
        assert run(steps, world, 1).decision == SLOWER
        assert [steps.pass_over() for _ in range(STOCK_STEPS)] == [SLOWER] * (STOCK_STEPS - 1) + [
            None
        ]
    assert steps.counters.steps == {SLOWER: 2}, "those of a preparer that counts are prepared"
    times.stock_us = 60.0
    world.reqs.pop()
    assert run(steps, world, 1).decision == FASTER, "held for as many steps as have passed"
    assert steps.pass_over() is None
    checked = preparer(Settings(check=True), predictor=Times(stock=10.0, prefix=20.0))
    run(checked, world, 1)
    assert checked.pass_over() is None


def test_lengths_that_jump_make_a_plan_anew_and_leave_a_decision_for_stock_kernels(world):
    times = Times(stock=10.0, prefix=20.0)
    steps = preparer(predictor=times)

    def looks(grown):
        asked = len(times.asked)
        while steps.pass_over() is not None:
            pass
        steps.lengths_jumped(world.seq_lens(grown))
        run(steps, world, grown)
        return len(times.asked) - asked

    assert [looks(grown) for grown in (1, 4, 5, 9)] == [1, 0, 0, 0]
    gone = world.reqs.pop()
    assert looks(10) == 1, "other requests"
    times.stock_us = 60.0
    world.reqs.append(gone)
    assert [looks(grown) for grown in (13, 15, 18)] == [1, 1, 1], "plans do not get the tokens"


def test_unique_tokens_of_a_stock_step_are_known_where_the_batch_was_evaluated(world):
    steps = preparer(predictor=Times(stock=10.0, prefix=20.0))
    for grown in range(1, STOCK_STEPS + 2):
        assert run(steps, world, grown).decision == SLOWER
    lengths = [41 + grown for grown in range(1, STOCK_STEPS + 2)]
    assert steps.counters.kv_tokens == {
        "read": 4 * sum(lengths),
        "query_centric": 4 * sum(lengths),
        # at the first step, and at the one whose batch was found to be the same
        "unique": 2 * 40 + 4 * (2 + 2 + STOCK_STEPS),
    }


def test_a_stock_batch_is_looked_at_again_after_some_steps_if_it_changed_or_has_grown(world):
    times = Times(stock=10.0, prefix=20.0)
    steps = preparer(Settings(headroom=2 * STOCK_STEPS), predictor=times)

    def looks(*grown):
        asked = len(times.asked)
        assert {run(steps, world, tokens).decision for tokens in grown} == {SLOWER}
        return len(times.asked) - asked

    assert looks(*range(1, STOCK_STEPS + 1)) == 1
    assert looks(*range(STOCK_STEPS + 1, 2 * STOCK_STEPS + 1)) == 0, "the same batch"
    gone = world.reqs.pop()
    assert looks(2 * STOCK_STEPS + 1) == 1, "another batch"
    world.reqs.append(gone)
    assert looks(*range(2 * STOCK_STEPS + 2, 3 * STOCK_STEPS + 1)) == 0, "not yet"
    assert looks(3 * STOCK_STEPS + 1) == 1
    unchanged = range(3 * STOCK_STEPS + 2, 6 * STOCK_STEPS + 2)
    assert looks(*unchanged) == 1, "it has grown by the headroom"


def test_after_a_switch_the_steps_are_counted_anew(world):
    times = Times(stock=20.0, prefix=10.0)
    steps = preparer(Settings(headroom=1), predictor=times)
    for grown in range(1, 2 * HOLD_STEPS):
        assert run(steps, world, grown).decision == FASTER
    times.prefix_us = 40.0
    while run(steps, world, grown := grown + 1).is_prefix:
        pass
    times.prefix_us = 19.0
    decisions = [run(steps, world, grown + i).decision for i in range(1, STOCK_STEPS + 1)]
    assert decisions[-1] == Decision("stock", "held")


def test_a_switch_to_prefix_plans_for_the_tokens_that_stock_steps_appended(world):
    times = Times(stock=10.0, prefix=20.0)
    steps = preparer(Settings(headroom=2), predictor=times)
    for grown in range(1, STOCK_STEPS + 1):
        assert not run(steps, world, grown).is_prefix
    times.stock_us = 60.0
    step = run(steps, world, STOCK_STEPS + 1)
    assert step.decision == FASTER
    lens = world.seq_lens(STOCK_STEPS + 1)
    assert step.new_plan.stats.kv_tokens_query_centric == lens.sum()


def test_a_forced_policy_asks_no_predictor(world):
    times = Times(stock=10.0, prefix=20.0)
    steps = preparer(Settings(policy="prefix"), predictor=times)
    assert run(steps, world, 1).decision == Decision("prefix", "forced")
    assert not times.asked
