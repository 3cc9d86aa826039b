"""Time per layer: CUDA-graph replay over several KV pools, median; plain calls on a CPU."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

_REPLAYS = {"cuda": 20, "cpu": 3}


class LayerTimer:
    """Captures `run(layer)` for every layer once; replays it for results and for time.

    On the CPU, or with capture=False, the same calls are made one by one ("eager").
    """

    def __init__(
        self, run: Callable[[int], torch.Tensor], layers: int, device: torch.device, capture: bool
    ):
        self._run = run
        self.layers = layers
        self.device_type = device.type
        self.outs: list[torch.Tensor] = []
        self._graph = None
        if device.type == "cuda" and capture:
            self._graph = self._capture()

    @property
    def kind(self) -> str:
        return "graph" if self._graph is not None else "eager"

    def replay(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        else:
            self.outs = [self._run(layer) for layer in range(self.layers)]

    def us(self) -> float:
        """Return the median of microseconds per layer."""
        return medians_us([self])[0]

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Capture all layers, on a stream of this timer's own: torch frees the workspaces of
        products by stream, with the first of its graphs that goes (pytorch/pytorch#193402)."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for layer in (0, 1 % self.layers):
                self._run(layer)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            self.outs = [self._run(layer) for layer in range(self.layers)]
        return graph

    def replay_us(self) -> float:
        """Replay once and return microseconds of all layers."""
        if self.device_type == "cpu":
            start = time.perf_counter()
            self.replay()
            return (time.perf_counter() - start) * 1e6
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.replay()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e3


def medians_us(timers: Sequence[LayerTimer]) -> list[float]:
    """Return each timer's median of microseconds per layer. Their replays take turns: the GPU's
    clocks, which move meanwhile, are the same for all of them. Before each runs the first, another
    kernel: one that ran just before takes 1.5 % less, and in a model none did."""
    for timer in [*timers, *timers]:
        timer.replay()
    first, *others = timers
    us: list[list[float]] = [[] for _ in timers]
    for _ in range(_REPLAYS[first.device_type]):
        for i, timer in enumerate(others, 1):
            us[0].append(first.replay_us())
            us[i].append(timer.replay_us())
        if not others:
            us[0].append(first.replay_us())
    return [statistics.median_high(x) / timer.layers for x, timer in zip(us, timers, strict=True)]
