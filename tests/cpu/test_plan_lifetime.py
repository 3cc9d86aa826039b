"""Plan lifetime: every condition on its own. Each case changes one thing and nothing else."""

import gc
from types import SimpleNamespace

import numpy as np
import pytest

from sgl_prefix_attn.paths.tree_reader import KvMapping, RunningBatch
from sgl_prefix_attn.step.plan_lifetime import PlanLifetime
from tests.support.fake_sglang import Node, RadixCache, World


def allocation():
    """SGLang's ReqKvInfo: two of them compare equal, and only identity tells them apart."""
    return SimpleNamespace(kv_allocated_len=7)


class Case:
    """Four requests and the lifetime of a plan for them, whose own step has run."""

    def __init__(self, headroom=8):
        self.world = World()
        for i in range(4):
            self.world.add([0, 1, 2, i])
        self.reqs, self.lens, self.remaps = self.world.reqs, self.world.seq_lens, None
        self.lifetime = PlanLifetime()
        self.plan(headroom=headroom)
        self.lifetime.stepped()

    def _batch(self, reqs, seq_lens):
        cache = RadixCache()
        if self.remaps is not None:
            cache.prefix_attn_remaps = self.remaps
        reqs = self.reqs if reqs is None else reqs
        return RunningBatch(reqs, cache, self.lens(1) if seq_lens is None else seq_lens, None)

    def plan(self, seq_lens=None, headroom=8):
        self.lifetime.planned(self._batch(None, seq_lens), headroom)

    def stale(self, seq_lens=None, reqs=None):
        """Why the step after the planned one needs a new plan."""
        seq_lens = self.lens(2) if seq_lens is None else seq_lens
        return self.lifetime.stale(self._batch(reqs, seq_lens))


@pytest.fixture
def case():
    return Case()


@pytest.mark.parametrize("headroom", [0, 8])
def test_steady_steps_stay_valid_until_the_headroom_is_full(headroom):
    case = Case(headroom=headroom)
    for step in range(headroom):
        assert case.stale(case.lens(2 + step)) is None
        case.lifetime.stepped()
    assert case.stale(case.lens(2 + headroom)) == "headroom"


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_lengths_are_compared_at_every_step_of_a_long_run(case, dtype):
    first = case.lens(1).astype(dtype)
    case.plan(first, headroom=200)
    for step in range(100):
        now = first + dtype(step)
        assert case.stale(now) is None
        for wrong in (step - 1, step + 1, step + 32):
            assert case.stale(first + dtype(wrong)) == "lengths"
        now[-1] += 1
        assert case.stale(now) == "lengths"
        case.lifetime.stepped()


def twin(node):
    """What cache_unfinished_req maps a request to whose tokens it found in the tree."""
    return Node(node and node.parent, [2], [99])


# Name -> (why the next step must plan anew, requests and lengths of that step).
CHANGES = {
    "joined": ("composition", lambda c, r, n: ([*r, c.world.add([0, 1])], np.append(n, 3))),
    "left": ("composition", lambda c, r, n: (r[:3], n[:3])),
    "replaced": ("composition", lambda c, r, n: ([Case().reqs[0], *r[1:]], n)),
    "reordered": ("composition", lambda c, r, n: (r[::-1], n)),
    "reordered_in_place": ("composition", lambda c, r, n: (r.reverse(), (r, n))[1]),
    "duplicate": ("mapping", lambda c, r, n: (changed(r, 2, last_node=twin(r[2].last_node)), n)),
    "protected": ("mapping", lambda c, r, n: (changed(r, 1, cache_protected_len=9), n)),
    # Of every request retracted at once (pause_generation): same objects and lengths, other slots.
    "allocation": ("mapping", lambda c, r, n: (changed(r, 3, kv=allocation()), n)),
    "retracted": ("mapping", lambda c, r, n: (changed(r, 3, retraction_count=1), n)),
    # Mixed chunks and stock steps do not call stepped(): the plan lacks their tokens.
    "not_appended": ("lengths", lambda c, r, n: (r, n + 3)),
    "one_length": ("lengths", lambda c, r, n: (r, n + np.array([0, 0, 0, 1]))),
    "capture": ("capture", lambda c, r, n: (c.lifetime.invalidate("capture"), (r, n))[1]),
}


def changed(reqs, i, **values):
    vars(reqs[i]).update(values)
    return reqs


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("radix_cache", [True, False])
def test_each_condition_has_its_cause(case, change, radix_cache):
    for req in case.reqs:
        req.kv = allocation()
        req.last_node = req.last_node if radix_cache else None
    case.plan()
    case.lifetime.stepped()
    assert case.stale() is None
    cause, make = CHANGES[change]
    case.reqs, seq_lens = make(case, case.reqs, case.lens(2))
    assert case.stale(seq_lens) == cause
    case.lifetime.invalidate("fault")
    case.lifetime.invalidate("capture")
    assert case.stale(seq_lens) == ("capture" if change == "capture" else "fault"), "the first"
    case.plan(seq_lens)
    assert case.stale(seq_lens) is None, "another plan serves it"


def test_references_are_kept_not_addresses(case):
    paths = [(r.last_node, r.cache_protected_len, r.kv) for r in case.reqs]
    ids, lens = {id(r) for r in case.reqs}, case.lens(2)
    case.world = case.reqs = case.lens = None
    gc.collect()
    fresh = [SimpleNamespace(last_node=n, cache_protected_len=p, kv=kv) for n, p, kv in paths]
    assert not ids & {id(r) for r in fresh}, "a kept reference keeps the address taken"
    assert case.stale(lens, fresh) == "composition"


def test_a_steady_step_reads_no_request(case, monkeypatch):
    case.remaps = 7
    assert case.stale() is None
    monkeypatch.setattr(KvMapping, "of", lambda reqs: 1 / 0)
    for grown in (2, 3, 4):
        assert case.stale(case.lens(grown)) is None
        case.lifetime.stepped()
    assert case.stale(case.lens(4)) == "lengths"
    assert case.stale(case.lens(5)[:3], case.reqs[:3]) == "composition"


@pytest.mark.parametrize("event", ["counted", "another_list", "not_counted"])
def test_mappings_are_compared_whenever_sglang_may_have_remapped(case, event):
    case.remaps, remaps_then = {
        "counted": (7, 8), "another_list": (7, 7), "not_counted": (None, None)
    }[event]  # fmt: skip
    assert case.stale() is None
    case.reqs[2].kv = allocation()
    case.reqs[2].kv.kv_allocated_len = 8
    case.remaps = remaps_then
    case.reqs = list(case.reqs) if event == "another_list" else case.reqs
    for _ in range(2):  # until there is another plan
        assert case.stale() == "mapping"
    case.plan(case.lens(2))
    assert case.stale() is None


def test_a_new_plan_is_compared_with_the_requests_once_more(case):
    """The count may have been taken before SGLang remapped, the plan after it."""
    case.remaps = 7
    assert case.stale() is None
    lens = case.lens(2)
    case.plan(lens)
    case.reqs[1].cache_protected_len += 1
    assert case.stale(lens) == "mapping"


def test_at_first_there_is_no_plan():
    assert PlanLifetime().stale(None) == "first"
