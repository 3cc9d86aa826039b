"""Plan lifetime: every condition on its own. Each test changes one thing and nothing else."""

import gc
from types import SimpleNamespace

import numpy as np
import pytest

from sgl_prefix_attn.paths.radix_reader import RadixReader
from sgl_prefix_attn.paths.tree_reader import RunningBatch
from sgl_prefix_attn.step.plan_lifetime import CAUSES, PlanLifetime
from tests.support.fake_sglang import Node, RadixCache, World


def stale(lifetime, reqs, seq_lens, remaps=None):
    cache = RadixCache()
    if remaps is not None:
        cache.prefix_attn_remaps = remaps
    return lifetime.stale(RunningBatch(reqs, cache, seq_lens, None), RadixReader())


def plan(lifetime, reqs, seq_lens, appends_left):
    lifetime.planned(RunningBatch(reqs, RadixCache(), seq_lens, None), RadixReader(), appends_left)


@pytest.fixture
def world():
    world = World()
    for i in range(4):
        world.add([0, 1, 2, i])
    return world


@pytest.fixture
def planned(world):
    """A lifetime with a plan for `world`, whose planned step has run."""
    lifetime = PlanLifetime()
    assert stale(lifetime, world.reqs, world.seq_lens()) == "first"
    plan(lifetime, world.reqs, world.seq_lens(), appends_left=8)
    lifetime.stepped()
    return lifetime


def test_steady_steps_stay_valid_until_the_headroom_is_full(world, planned):
    for step in range(8):
        assert stale(planned, world.reqs, world.seq_lens(2 + step)) is None
        planned.stepped()
    assert stale(planned, world.reqs, world.seq_lens(10)) == "headroom"


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_lengths_are_compared_at_every_step_of_a_long_run(world, dtype):
    lifetime, first = PlanLifetime(), world.seq_lens().astype(dtype)
    plan(lifetime, world.reqs, first, appends_left=200)
    for step in range(100):
        assert stale(lifetime, world.reqs, first + dtype(step)) is None
        for wrong in (step - 1, step + 1, step + 32):
            assert stale(lifetime, world.reqs, first + dtype(wrong)) == "lengths"
        one_ahead = first + dtype(step)
        one_ahead[-1] += 1
        assert stale(lifetime, world.reqs, one_ahead) == "lengths"
        lifetime.stepped()


def test_condition_a_other_requests(world, planned):
    joined = World()
    newcomer = joined.add([0, 1])
    lens = world.seq_lens(2)
    assert stale(planned, [*world.reqs, newcomer], np.append(lens, 3)) == "composition"
    assert stale(planned, world.reqs[:3], lens[:3]) == "composition"
    assert stale(planned, [newcomer, *world.reqs[1:]], lens) == "composition"


def test_condition_a_same_requests_in_another_order(world, planned):
    assert stale(planned, world.reqs[::-1], world.seq_lens(2)) == "composition"


def test_condition_a_survives_a_list_changed_in_place(world, planned):
    world.reqs[0], world.reqs[1] = world.reqs[1], world.reqs[0]
    assert stale(planned, world.reqs, world.seq_lens(2)) == "composition"


def test_condition_a_needs_references_not_addresses(world):
    lifetime = PlanLifetime()
    reqs = world.reqs
    plan(lifetime, reqs, world.seq_lens(), appends_left=8)
    lifetime.stepped()
    lens, paths = world.seq_lens(2), [(r.last_node, r.cache_protected_len, r.kv) for r in reqs]
    ids = {id(r) for r in reqs}
    world.reqs = reqs = None
    gc.collect()
    fresh = [SimpleNamespace(last_node=n, cache_protected_len=p, kv=kv) for n, p, kv in paths]
    assert not ids & {id(r) for r in fresh}, "a kept reference keeps the address taken"
    assert stale(lifetime, fresh, lens) == "composition"


def test_condition_b_duplicate_mapped_to_the_first_ones_slots(world, planned):
    # cache_unfinished_req found the request's tokens in the tree: other node, same lengths.
    twin = Node(world.reqs[2].last_node.parent, [2], [99])
    world.reqs[2].last_node = twin
    assert stale(planned, world.reqs, world.seq_lens(2)) == "mapping"


def test_condition_b_protected_length(world, planned):
    lens = world.seq_lens(2)
    world.reqs[1].cache_protected_len += 1
    assert stale(planned, world.reqs, lens) == "mapping"


def test_condition_b_new_allocation_without_a_tree(world):
    # Radix cache off and every request retracted at once (pause_generation): same objects, same
    # lengths, no nodes, but other slots. SGLang's ReqKvInfo compares by value, so identity counts.
    for req in world.reqs:
        req.last_node, req.cache_protected_len = None, 0
        req.kv = SimpleNamespace(kv_allocated_len=7)
    lifetime = PlanLifetime()
    lens = np.full(4, 5)
    plan(lifetime, world.reqs, lens, appends_left=8)
    lifetime.stepped()
    assert stale(lifetime, world.reqs, lens + 1) is None
    for req in world.reqs:
        req.kv = SimpleNamespace(kv_allocated_len=7)
    assert stale(lifetime, world.reqs, lens + 1) == "mapping"


def test_a_steady_step_reads_no_request(world, planned, monkeypatch):
    assert stale(planned, world.reqs, world.seq_lens(2), 7) is None
    monkeypatch.setattr(RadixReader, "mapping", lambda self, reqs: 1 / 0)
    for grown in (2, 3, 4):
        assert stale(planned, world.reqs, world.seq_lens(grown), 7) is None
        planned.stepped()
    assert stale(planned, world.reqs, world.seq_lens(4), 7) == "lengths"
    assert stale(planned, world.reqs[:3], world.seq_lens(5)[:3], 7) == "composition"


@pytest.mark.parametrize("event", ["counted", "another_list", "not_counted"])
def test_condition_b_is_looked_for_whenever_sglang_may_have_remapped(world, planned, event):
    reqs = world.reqs
    remaps = {"counted": (7, 8), "another_list": (7, 7), "not_counted": (None, None)}[event]
    assert stale(planned, reqs, world.seq_lens(2), remaps[0]) is None
    reqs[2].kv = SimpleNamespace(kv_allocated_len=7)
    reqs = list(reqs) if event == "another_list" else reqs
    for _ in range(2):  # until there is another plan
        assert stale(planned, reqs, world.seq_lens(2), remaps[1]) == "mapping"
    plan(planned, reqs, world.seq_lens(2), appends_left=8)
    assert stale(planned, reqs, world.seq_lens(2), remaps[1]) is None


def test_a_new_plan_is_compared_with_the_requests_once_more(world, planned):
    """The count may have been taken before SGLang remapped, the plan after it."""
    assert stale(planned, world.reqs, world.seq_lens(2), 7) is None
    plan(planned, world.reqs, world.seq_lens(2), appends_left=8)
    world.reqs[1].cache_protected_len += 1
    lens = world.seq_lens(2)
    lens[1] -= 1
    assert stale(planned, world.reqs, lens, 7) == "mapping"


def test_condition_c_mixed_chunk_moves_every_length(world, planned):
    assert stale(planned, world.reqs, world.seq_lens(2 + 3)) == "lengths"


def test_condition_c_five_stock_steps_then_a_prefix_step(world, planned):
    # Stock steps do not call stepped(): their tokens were never appended to the plan's segments.
    assert stale(planned, world.reqs, world.seq_lens(2 + 5)) == "lengths"


def test_condition_c_one_request_alone(world, planned):
    lens = world.seq_lens(2)
    lens[3] += 1
    assert stale(planned, world.reqs, lens) == "lengths"


def test_condition_c_does_not_alias_sglangs_lengths(world):
    lifetime = PlanLifetime()
    lens = world.seq_lens()
    plan(lifetime, world.reqs, lens, appends_left=8)
    lifetime.stepped()
    lens += 4  # SGLang reuses the buffer
    assert stale(lifetime, world.reqs, world.seq_lens(2)) is None


def test_condition_d_capture(world, planned):
    planned.invalidate("capture")
    assert stale(planned, world.reqs, world.seq_lens(2)) == "capture"
    plan(planned, world.reqs, world.seq_lens(2), appends_left=8)
    planned.stepped()
    assert stale(planned, world.reqs, world.seq_lens(3)) is None


def test_the_first_cause_of_invalidity_is_kept(world, planned):
    planned.invalidate("composition")
    planned.invalidate("capture")
    assert stale(planned, world.reqs, world.seq_lens(2)) == "composition"


def test_a_plan_without_headroom_serves_one_step(world):
    lifetime = PlanLifetime()
    plan(lifetime, world.reqs, world.seq_lens(), appends_left=0)
    assert stale(lifetime, world.reqs, world.seq_lens()) is None
    lifetime.stepped()
    assert stale(lifetime, world.reqs, world.seq_lens(2)) == "headroom"


def test_causes_are_named():
    causes = {"first", "capture", "composition", "mapping", "lengths", "headroom", "fault"}
    assert set(CAUSES) == causes
