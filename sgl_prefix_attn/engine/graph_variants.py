"""The second set of decode CUDA graphs: for each batch size, beside SGLang's own stock graph, one
that holds the prefix kernels. A step chooses between the two at replay.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from traceback import walk_tb
from types import TracebackType

import torch

logger = logging.getLogger(__name__)

LIMIT = "PREFIX_ATTN_MAX_VARIANT_BS"
_GRAPHS = ("CUDAGraph", "BreakableCUDAGraph")  # torch's, and SGLang's of several


def prefix_label(label: str | None) -> str:
    """ShapeKey.variant_label of the prefix graph beside the stock graph with this label."""
    return "prefix" if label is None else f"{label}+prefix"


class GraphVariants:
    """Which batch sizes have a prefix graph, and what those graphs cost.

    max_bs          largest size that gets one; every size that SGLang captures has a stock graph
    raise_failures  raise when a capture fails instead of going on without: with tensor parallelism
                    one rank must not decide alone
    steps           what the graphs run, for the log
    """

    def __init__(self, max_bs: int, *, raise_failures: bool, steps: str = "decode"):
        self.max_bs, self._steps = max_bs, steps
        self.raise_failures = raise_failures
        self.reset()

    def reset(self) -> None:
        """SGLang is about to capture all its graphs anew."""
        self.capturing = False  # a prefix graph is being captured
        self._sizes: list[int] = []  # that SGLang captures, ascending
        self._with_prefix: set[int] = set()
        self._failed = False
        self._kept: list[object] = []
        # what prefix graphs took beside SGLang's own
        self._graphs, self._seconds, self._bytes = 0, 0.0, 0

    def problem(self, batch_size: int) -> str | None:
        """Say why a step of this batch size cannot replay a prefix graph; None when it can, or when
        there is no graph at all for so many requests and none failed: kernels that could not be
        captured are not tried without a graph."""
        at = bisect_left(self._sizes, batch_size)
        if at == len(self._sizes):
            return "graph_capture_failed" if self._failed else None
        if self._sizes[at] in self._with_prefix:
            return None
        return "graph_batch_size" if self._sizes[at] > self.max_bs else "graph_capture_failed"

    def padded_size(self, batch_size: int) -> int:
        """Return the rows of the graph that such a batch replays; its own size without one."""
        at = bisect_left(self._sizes, batch_size)
        return self._sizes[at] if at < len(self._sizes) else batch_size

    def capture(
        self, size: int, sizes: Sequence[int], capture_one: Callable[[], None], device
    ) -> None:
        """Capture the prefix graph of `size` by calling capture_one(), unless there is to be none.

        sizes are all that SGLang captures, device is torch.cuda or the like. The first failure is
        logged, and no more are captured. Raises RuntimeError instead where that is not safe.
        """
        self._sizes = sorted(sizes)
        if size > self.max_bs or self._failed:
            return
        free, start = device.mem_get_info()[0], time.perf_counter()
        self.capturing = True
        try:
            capture_one()
            self._with_prefix.add(size)
            self._graphs += 1
        except Exception as error:
            self._give_up(size, error, device)
        finally:
            self.capturing = False
        self._seconds += time.perf_counter() - start
        self._bytes += free - device.mem_get_info()[0]

    def log_cost(self) -> None:
        """Log one line about all prefix graphs; nothing when there are none."""
        if self._graphs:
            logger.info(
                "%s CUDA graphs with prefix kernels: %d graphs took %.1f s and %.0f MiB beside "
                "SGLang's own; %s limits the batch size up to which they are captured",
                self._steps,
                self._graphs,
                self._seconds,
                self._bytes / 2**20,
                LIMIT,
            )

    def _give_up(self, size: int, error: Exception, device) -> None:
        self._failed = True
        self._with_prefix.discard(size)  # of several labels an earlier one may have worked
        # Not of this class's own frame: to look at its variables would tie `error` to itself.
        self._kept += _graphs_of(error.__traceback__ and error.__traceback__.tb_next)
        if self.raise_failures or not _usable_after(error, device):
            raise RuntimeError(
                f"--attention-backend prefix: capturing the prefix CUDA graph of batch size {size} "
                f"failed: {error}. Set {LIMIT} below {size} to capture fewer of them (0: none), or "
                f"leave more memory to CUDA graphs with a lower --mem-fraction-static"
            ) from error
        logger.error(
            "%s batches of up to %d requests run stock attention (graph_capture_failed): "
            "capturing the prefix CUDA graph failed: %s. %s limits these graphs (0: none)",
            self._steps,
            size,
            error,
            LIMIT,
            exc_info=error,
        )


def _graphs_of(traceback: TracebackType | None) -> list[object]:
    """Return the graphs that were being captured in a traceback's frames, to be kept: torch 2.14
    frees the workspaces of products that all graphs of a stream use, SGLang's stock graphs among
    them, with the first of those graphs that goes (pytorch/pytorch#193402)."""
    values = (x for frame, _ in walk_tb(traceback) for x in frame.f_locals.values())
    return [x for x in values if type(x).__name__ in _GRAPHS]


def _usable_after(error: Exception, device) -> bool:
    """Tell whether stock graphs can still be captured and replayed after a capture that failed.

    Leaving torch.cuda.graph ends the capture. Where even that fails, its CUDA error replaces the
    first one, and torch's allocator stays in capture mode for good. The same class of errors stands
    for kernels that broke the CUDA context. What is left, memory that the allocator did not get, a
    compiler's or Python's error, costs this graph alone.
    """
    if isinstance(error, torch.AcceleratorError):
        return False
    try:
        device.synchronize()
    except RuntimeError:
        return False
    return True
