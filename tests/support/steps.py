"""A StepPreparer over a fake radix tree, for tests of steps and of what is counted about them."""

from sgl_prefix_attn.metrics.counters import StepCounters
from sgl_prefix_attn.plan.capacity import UNLIMITED
from sgl_prefix_attn.records import HeadConfig
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.step.preparer import StepPreparer
from tests.support import forests
from tests.support.fake_sglang import World

HEADS = HeadConfig(8, 2, 32)
DEFAULTS = Settings()


def planner(headroom=64):
    """Every shared node is read once, whatever it costs."""
    return forests.planner(HEADS, "naive", headroom)


def preparer(
    settings=DEFAULTS, plan_with=None, capacity=UNLIMITED, counters=None, **options
) -> StepPreparer:
    plan_with = plan_with or planner(settings.headroom)
    plan_with.capacity = capacity
    counters = StepCounters() if counters is None else counters
    return StepPreparer(settings, plan_with, counters, **options)


def shared_world() -> World:
    """4 requests with 40 shared tokens and one cached token of their own each."""
    world = World()
    for i in range(4):
        world.add([0] * 40 + [1 + i], tail=20)
    return world


def run(steps, world, grown, cache=None):
    """The step in which every request has `grown` tokens beyond the cached ones."""
    return steps.prepare(world.batch(grown, cache))


class Failing:
    """A planner whose n-th call raises."""

    def __init__(self, *failing_calls, headroom=64):
        self.planner, self.failing, self.calls = planner(headroom), failing_calls, 0

    def plan_forest(self, forest, before=None):
        self.calls += 1
        if self.calls in self.failing:
            raise ZeroDivisionError("planted")
        return self.planner.plan_forest(forest, before)


class Times:
    """A predictor with given microseconds; remembers what it was asked."""

    def __init__(self, stock, prefix):
        self.stock_us, self.prefix_us = stock, prefix
        self.source = "measured"
        self.asked = []

    def stock(self, seq_lens, unique, query_lens=None):
        self.asked.append((seq_lens.tolist(), unique))
        return self.stock_us

    def prefix(self, plan):
        assert plan.stats.kv_tokens_read > 0
        return self.prefix_us
