"""python -m eval.bench_trees [--json OUT]: what reading paths off SGLang's own radix tree costs.

Builds the UnifiedRadixCache of the SGLang installed with each core that it has, inserts prompts of
four levels, one leaf per request, and reads the paths as a decode step without a valid plan does.
Prints medians in microseconds on one core. (RadixCache: `walk` of eval.bench_plan.)
"""

from __future__ import annotations

import argparse
import array
import os
import sys
from types import SimpleNamespace

import numpy as np
import torch

from eval import provenance
from eval.bench_plan import median_ms, run_on_one_core
from eval.cli_values import output, several
from sgl_prefix_attn.cli.argument_types import count
from sgl_prefix_attn.engine.start_checks import TREE_CORE
from sgl_prefix_attn.paths.readers import reader_of, unsupported_tree
from sgl_prefix_attn.paths.tree_reader import RunningBatch

BATCHES = (64, 256, 1024)
CORES = ("python", "rust")
TARGET_US = {256: 250.0}
_GROUPS = 8


def make_cache(core: str, **changes):
    """Make SGLang's tree with one of its cores, over a pool that is never read; `changes` of its
    parameters.

    Raises ValueError for a core that it does not have.
    """
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    from sglang.srt.runtime_context import get_context

    get_context().override_server_args().install()
    os.environ[TREE_CORE] = core
    allocator = SimpleNamespace(device="cpu", page_size=1, free=_nothing, free_segment=_nothing)
    return UnifiedRadixCache(
        CacheInitParams(
            disable=False,
            req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(4, 8, dtype=torch.int32)),
            token_to_kv_pool_allocator=allocator,
            page_size=1,
            tree_components=(ComponentType.FULL,),
            **changes,
        )
    )


def prompts(batch: int) -> list[list[int]]:
    """One prompt for all, one of eight groups, one of two requests, one request's own."""
    return [
        [7] * 512 + [100 + i // 2 % _GROUPS] * 64 + [1000 + i // 2] * 32 + [100_000 + i] * 40
        for i in range(batch)
    ]


def fill(cache, batch: int) -> list:
    """Insert the prompts and return requests that end at their leaves."""
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    cache.reset()
    keys = [RadixKey(array.array("q", ids)) for ids in prompts(batch)]
    for i, key in enumerate(keys):
        start = i * len(key)
        cache.insert(InsertParams(key=key, value=torch.arange(start, start + len(key))))
    ends = [cache.match_prefix(MatchPrefixParams(key=key)).last_device_node for key in keys]
    return [SimpleNamespace(last_node=end, rid=str(i)) for i, end in enumerate(ends)]


def measure(core: str, batch: int, repeats: int) -> dict:
    """Time a core's paths. Raises ValueError where this SGLang's core shows none."""
    cache = make_cache(core)
    problem = unsupported_tree(cache)
    if problem is not None:
        raise ValueError(problem)
    reqs = fill(cache, batch)
    running = RunningBatch(reqs, cache, np.full(batch, 700), None)
    reader = reader_of(cache)
    nodes = reader.read_paths(running).length.size
    us = 1e3 * median_ms(lambda: reader.read_paths(running), repeats)
    return {"core": type(cache.tree_core).__name__, "batch": batch, "nodes": nodes, "us": us}


def _nothing(*args, **kwargs) -> None:
    pass


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.bench_trees", description=__doc__)
    parser.add_argument("--json", type=output, metavar="OUT")
    parser.add_argument("--batches", type=several(count), default=BATCHES)
    parser.add_argument("--repeats", type=count, default=51)
    args = parser.parse_args(argv)
    run_on_one_core()
    rows, missed = [], []
    for core in CORES:
        for batch in args.batches:
            try:
                row = measure(core, batch, args.repeats)
            except ValueError as error:
                print(f"{core}: {error}")
                break
            rows.append(row)
            print(f"{row['core']:24} {batch:5} requests {row['nodes']:5} nodes {row['us']:8.1f} us")
            if row["us"] > TARGET_US.get(batch, float("inf")):
                missed.append(f"{row['core']}: {row['us']:.0f} us, target {TARGET_US[batch]:.0f}")
    for line in missed:
        print(f"target missed at 256 requests: {line}")
    if args.json:
        provenance.save(args.json, provenance.collect("eval.bench_trees", argv), rows)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
