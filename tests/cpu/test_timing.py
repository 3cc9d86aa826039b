"""How replays are timed: who takes turns with whom, and what a median is of."""

import pytest

from sgl_prefix_attn.calibrate import timing
from sgl_prefix_attn.calibrate.timing import medians_us


class Timer:
    """A LayerTimer whose replays take given times; `turns` is shared by several of them."""

    device_type = "cpu"

    def __init__(self, name, layers, times, turns):
        self.name, self.layers, self.times, self.turns = name, layers, list(times), turns

    def replay(self):
        self.turns.append(f"warm {self.name}")

    def replay_us(self):
        self.turns.append(self.name)
        return self.times.pop(0)


def test_timers_take_turns_and_keep_their_order(monkeypatch):
    monkeypatch.setitem(timing._REPLAYS, "cpu", 3)
    turns = []
    timers = [Timer("a", 2, (20.0, 900.0, 24.0), turns), Timer("b", 4, (40.0, 44.0, 4.0), turns)]
    assert medians_us(timers) == pytest.approx([12.0, 10.0])
    assert turns[:4] == ["warm a", "warm b"] * 2
    assert turns[4:] == ["a", "b"] * 3
