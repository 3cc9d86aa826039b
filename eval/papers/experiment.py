"""What an experiment of a paper is, and what several of them have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from eval.papers.figures import Figure
from sgl_prefix_attn.records import HeadConfig
from sgl_prefix_attn.tools.calibrate.batches import Batch

Rows = list[dict]
LLAMA3, LLAMA2 = HeadConfig(32, 8, 128), HeadConfig(32, 32, 128)
WIDE, NARROW = HeadConfig(64, 8, 128), HeadConfig(16, 8, 128)
QWEN7, QWEN14 = HeadConfig(28, 4, 128), HeadConfig(40, 8, 128)


class Run(NamedTuple):
    """One batch with one configuration of heads."""

    batch: Batch
    heads: HeadConfig
    page_size: int = 1
    count_launches: bool = False


@dataclass(frozen=True)
class Claim:
    """A number of a paper and ours beside it.

    says      what it is of
    paper     the paper's number
    figure    ours, of an experiment's rows
    expected  what was expected on an H200 before any run, of times: 10 microseconds and the larger
              of unique bytes at 4.2 TB/s and operations at 370 TFLOP/s; of stock kernels 0.12
              microseconds a request more and all of its bytes from the L2 cache at 7.5 TB/s
    counted   ours follows from plans and lengths, without a run
    """

    says: str
    paper: str
    figure: Figure
    expected: str
    counted: bool = False


@dataclass(frozen=True)
class Experiment:
    """One figure or table of a paper.

    missing  what of it does not reproduce on a Hopper GPU, and why
    runs     kernels that are timed here ...
    count    ... or rows that are counted ...
    derive   ... or made from the rows of a result file of the command `source`
    """

    name: str
    place: str
    claims: tuple[Claim, ...]
    missing: str
    runs: tuple[Run, ...] = ()
    count: Callable[[], Rows] | None = None
    derive: Callable[[Rows], Rows] | None = None
    source: str = ""

    @property
    def command(self) -> str:
        ours = f"python -m eval.papers {self.name}"
        return f"{self.source} --json R.json && {ours} --from R.json" if self.source else ours


def runs_of(made: tuple[Batch, ...], *all_heads: HeadConfig, **more) -> tuple[Run, ...]:
    """Make the runs of batches with each configuration of heads."""
    return tuple(Run(batch, heads, **more) for heads in all_heads for batch in made)
