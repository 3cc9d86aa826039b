"""A race planted in Hopper's kernel, and racecheck's reports."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from sgl_prefix_attn.kernels.hopper import attention, consumer

EARLY_READ = "early-read"
_RACE = re.compile(r"={4,} (?:Error|Warning): Race reported between .* in (\S+:\d+)")
_AND = re.compile(r"={4,}\s+and .* in (\S+:\d+) \[")
# A block's keys are read where they are needed; the fault reads them before they are waited for.
_WAIT = "                    mbarrier.wait(rings.k_full.index(stage), phase)\n"
_READ = "rings.keys.index(stage).load(gl.SliceLayout(0, SL))"


def plant_early_read() -> None:
    """Let this process compile Hopper's kernel with the fault."""
    attention.consume = _reads_early().consume


def _reads_early():
    """Import a copy of the consumers that read a block's keys too early."""
    source = inspect.getsource(consumer)
    assert source.count(_WAIT) == source.count(_READ) == 1, "the consumers' loop is another one"
    source = source.replace(_READ, "early").replace(
        _WAIT, f"                    early = {_READ}\n{_WAIT}"
    )
    path = Path(tempfile.mkdtemp(prefix="sanitize-")) / "consumer.py"  # Triton reads it later
    path.write_text(source)
    name = f"{consumer.__package__}.consumer_that_reads_early"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Races(NamedTuple):
    """Reports of racecheck.

    of_the_compiler  on the word over which Triton hands a warp its function, between two barriers
                     of the whole CTA: read and written nowhere but there
    """

    ours: int
    of_the_compiler: int

    @classmethod
    def of(cls, text: str) -> Races:
        races: list[set[str]] = []
        for line in text.splitlines():
            if first := _RACE.match(line):
                races.append({first[1]})
            elif races and (other := _AND.match(line)):
                races[-1].add(other[1])
        starts = _starts_of_warps()
        theirs = sum(race <= starts for race in races)
        return cls(len(races) - theirs, theirs)


def _starts_of_warps() -> set[str]:
    """Name the lines that Triton gives code of its own: the kernel's first and its last call."""
    path = Path(inspect.getfile(attention))
    return {
        f"{path.name}:{number}"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if line.startswith("def row_tile_kernel(") or line.startswith("    gl.warp_specialize(")
    }
