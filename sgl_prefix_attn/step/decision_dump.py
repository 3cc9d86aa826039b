"""Some of the batches that a server decides about, as files that `explain` draws."""

from __future__ import annotations

import os
from pathlib import Path

import orjson

from sgl_prefix_attn.metrics.counters import StepCounters
from sgl_prefix_attn.records import Decision, PathTable

MOST_FILES = 256  # of a process; from there on the oldest is written over


class DecisionDump:
    """Writes every n-th decision into `folder`, PREFIX_ATTN_DUMP; "" writes none.

    Files are <process>-<number>.json. One that cannot be written is counted, and no reason to stop.
    aligned  plans are those of deterministic inference
    """

    def __init__(self, folder: str, every: int, counters: StepCounters, *, aligned: bool):
        self._folder = Path(folder) if folder else None
        self._every = every
        self._aligned = aligned
        self._counters = counters
        self._seen = 0

    def decided(self, paths: PathTable, decision: Decision) -> None:
        """Take one more decision and what it is about."""
        if self._folder is None:
            return
        turn, rest = divmod(self._seen, self._every)
        self._seen += 1
        if rest:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            file = self._folder / f"{os.getpid()}-{turn % MOST_FILES:03}.json"
            unfinished = file.with_suffix(".part")
            unfinished.write_bytes(orjson.dumps(content(paths, decision, aligned=self._aligned)))
            unfinished.replace(file)
        except Exception as error:  # whatever it is, the step itself can go on
            self._counters.dump_failed(error)


def content(paths: PathTable, decision: Decision, *, aligned: bool = False) -> dict:
    """What a file holds: the arguments of PrefixAttentionWrapper.plan, and the decision."""
    lists: list[list[tuple[int, int]]] = []
    parent, length = paths.parent.tolist(), paths.length.tolist()
    for node in paths.leaf.tolist():
        path = []
        while node >= 0:
            if length[node]:
                path.append((node, length[node]))
            node = parent[node]
        lists.append(path[::-1])
    times = decision.predicted
    return {
        "paths": lists,
        "seq_lens": paths.seq_lens.tolist(),
        "decision": {
            "variant": decision.variant,
            "reason": decision.reason,
            "stock_us": times.stock_us if times else None,
            "prefix_us": times.prefix_us if times else None,
            "aligned": aligned,
        },
    }
