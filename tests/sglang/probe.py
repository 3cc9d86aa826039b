"""A test-only SGLang plugin: records every decode step and plants faults in the scheduler process.

engine.py puts a dist-info folder with its entry point on the engine's path. Steps are appended to
$PROBE_STEPS as JSON lines, with the tensor-parallel rank that made each; the fault to plant is read
from $PROBE_FAULT before each step, so that one engine serves many scenarios.
$PROBE_LORA_LABELS set: decode graphs are captured once for each of SGLang's LoRA labels.
$PROBE_ROW_TILES set: the server runs row tiles, in torch.
$PROBE_HOST_COPIES set: HiCache copies KV in torch, for it has no GPU.
"""

import dataclasses
import json
import multiprocessing
import os
import time
from pathlib import Path

from sgl_prefix_attn.paths.radix_reader import RadixReader
from sgl_prefix_attn.paths.unified_path_reader import UnifiedPathReader

# Every step takes so much longer: a request that joins when tokens have come back to the client
# must find others decoding, also where a busy machine lets the client wait for its turn.
PACE_S = 0.003
READERS = (RadixReader, UnifiedPathReader)  # and those that derive from them


def register():
    steps, fault_file = os.environ.get("PROBE_STEPS"), os.environ.get("PROBE_FAULT")
    if steps and fault_file:
        from sgl_prefix_attn.engine import build
        from sgl_prefix_attn.step import extend, preparer

        if os.environ.get("PROBE_HOST_COPIES"):
            from tests.support.host_copies import copy_with_torch

            copy_with_torch()
        _record_steps(preparer, Path(steps), Path(fault_file))
        _record_extends(extend, Path(steps))
        _plant_faults(preparer, build, Path(fault_file))
        if os.environ.get("PROBE_ROW_TILES"):
            from tests.support.torch_row_tiles import say_that_row_tiles_run

            say_that_row_tiles_run()
        if os.environ.get("PROBE_LORA_LABELS"):
            _capture_lora_labels()


def _capture_lora_labels():
    """Not every release sets record_nolora_graph on the decode runner."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    module = "sglang.srt.model_executor.runner.decode_cuda_graph_runner"
    HookRegistry.register(
        f"{module}.DecodeCudaGraphRunner.capture",
        lambda runner: setattr(runner, "record_nolora_graph", True),
        HookType.BEFORE,
    )


def _read(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""


def _count_evictions() -> list[int]:
    """KV tokens that each eviction of a radix cache freed."""
    from sglang.srt.mem_cache.radix_cache import RadixCache
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    freed = []

    def count(kind, name):
        evict = getattr(kind, name)

        def counted(*args, **kwargs):
            result = evict(*args, **kwargs)
            freed.append(result.num_tokens_evicted)
            return result

        setattr(kind, name, counted)

    count(RadixCache, "evict")
    # From 0.5.23 on an allocation evicts without evict().
    count(UnifiedRadixCache, "_evict" if hasattr(UnifiedRadixCache, "_evict") else "evict")
    return freed


def _count_loads() -> list[int]:
    """KV tokens of each time that HiCache copied from the host to the device."""
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    load, loaded = MHATokenToKVPoolHost.load_to_device_per_layer, []

    def counted(self, device_pool, host_indices, device_indices, layer_id, *args, **kwargs):
        if layer_id == 0:
            loaded.append(len(host_indices))
        return load(self, device_pool, host_indices, device_indices, layer_id, *args, **kwargs)

    MHATokenToKVPoolHost.load_to_device_per_layer = counted
    return loaded


def _record_steps(preparer, steps: Path, fault_file: Path):
    prepare, evicted, loaded = preparer.StepPreparer.prepare, _count_evictions(), _count_loads()
    read = []
    for reader in READERS:
        _note_calls(reader, "mapping", read)
    nth_step = {}

    def recorded(self, batch):
        time.sleep(PACE_S)
        read.clear()
        before = dict(self.counters.plans)
        fault = _read(fault_file)
        nth = nth_step[fault] = nth_step.get(fault, -1) + 1
        if nth == 0:
            # What stands is of the scenario before.
            self._stock = type(self._stock)(self.settings)
        settings = self.settings
        if _forces_stock(fault, nth):
            self.settings = dataclasses.replace(settings, policy="stock")
        try:
            step = prepare(self, batch)
        finally:
            self.settings = settings
        after = dict(self.counters.plans)
        record = {
            "rank": _rank(),
            "start_method": multiprocessing.get_start_method(),
            **_outcome(step, self.counters),
            "causes": [c for c in after if after[c] != before.get(c, 0)],
            "requests_read": bool(read),
            "evicted": sum(evicted),
            "loaded": sum(loaded),
            "requests": [req.rid for req in batch.reqs],
            "seq_lens": batch.seq_lens.tolist(),
            "nodes": step.new_plan.stats.num_nodes if step.new_plan else None,
        }
        with steps.open("a") as out:
            out.write(json.dumps(record) + "\n")
        return step

    preparer.StepPreparer.prepare = recorded


def _outcome(step, counters) -> dict:
    """What was decided about a batch, and what its plan, where it has a new one, reads."""
    plan = step.new_plan
    return {
        "variant": step.decision.variant,
        "reason": step.decision.reason,
        "read": plan.stats.kv_tokens_read if plan else None,
        "query_centric": plan.stats.kv_tokens_query_centric if plan else None,
        "cross_check": step.cross_check,
        "mismatches": counters.mismatches,
    }


def _record_extends(extend, steps: Path):
    """Extend batches that may run a plan, where prefix is the prefill backend, too."""
    prepare = extend.ExtendPreparer.prepare

    def recorded(self, batch, query_lens, *against):
        step = prepare(self, batch, query_lens, *against)
        record = {"extend": query_lens.tolist(), **_outcome(step, self._counters)}
        with steps.open("a") as out:
            out.write(json.dumps(record) + "\n")
        return step

    extend.ExtendPreparer.prepare = recorded


def _note_calls(kind, name: str, calls: list):
    method = getattr(kind, name)

    def noted(*args):
        calls.append(name)
        return method(*args)

    setattr(kind, name, noted)


def _rank() -> int:
    """Tensor-parallel rank of this scheduler process; known only once its engine starts."""
    from sgl_prefix_attn.engine import sglang_config

    return sglang_config.parallel().tp_rank


def _forces_stock(fault: str, nth: int) -> bool:
    """ "stock:6:11" forces the steps from 6 and below 11 of a scenario, "alternate" each second."""
    name, *bounds = fault.split(",")[0].split(":")
    if name == "alternate":
        return nth % 2 == 1
    return name == "stock" and _within(bounds, nth)


def _fails_to_plan(fault: str, nth: int) -> bool:
    """ "planner_error_rank1:3:5" fails plans 3 and 4 of a scenario, on rank 1 alone."""
    name, *bounds = fault.split(",")[0].split(":")
    if name == "planner_error":
        return True
    return name == "planner_error_rank1" and _rank() == 1 and _within(bounds, nth)


def _within(bounds: list[str], nth: int) -> bool:
    return int(bounds[0]) <= nth < int(bounds[1])


def _plant_faults(preparer, build, fault_file: Path):
    from eval.compare_outputs import faults
    from sgl_prefix_attn import plan as packs
    from sgl_prefix_attn.plan import row_tile_planner
    from tests.support.multi_token import CHAIN_FAULTS

    make_packs, make_tiles = packs.make_packs, row_tile_planner.make_tiles
    plan, plan_row_tiles = build.Planner.plan_forest, build.RowTilePlanner.plan_forest
    load, append = build.PlanExecutor.load, build.PlanExecutor.append
    stale, init = preparer.PlanLifetime.stale, preparer.StepPreparer.__init__
    nth_plan = {}

    def fault_of_plan():
        fault = _read(fault_file)
        nth = nth_plan[fault] = nth_plan.get(fault, -1) + 1
        if _fails_to_plan(fault, nth):
            raise ZeroDivisionError("planted")
        return fault

    def faulty_row_tile_plan(self, forest):
        change = CHAIN_FAULTS.get(fault_of_plan())
        good = plan_row_tiles(self, forest)
        if change is None or forest.query_lens is None or forest.query_lens.max() < 3:
            return good
        words = good.words.copy()
        change(words)
        return dataclasses.replace(good, words=words)

    def faulty_packs(*args):
        good = make_packs(*args)
        dropped = _read(fault_file) == "shared_node_dropped"
        return faults.without_largest_shared(good) if dropped else good

    def faulty_tiles(forest, *args):
        fault = _read(fault_file)
        # Where chains are verified over plans, plans of one query a request are of draft steps.
        drafts = fault == "draft_node_dropped" and forest.query_lens is None
        if fault == "shared_node_dropped" or drafts:
            forest = faults.with_largest_node_empty(forest)
        good = make_tiles(forest, *args)
        if fault != "tails_swapped":
            return good
        run = faults.with_two_tail_runs_swapped(forest, good.run)
        return dataclasses.replace(good, run=run)

    def faulty_plan(self, forest):
        fault = fault_of_plan()
        good = plan(self, forest)
        if fault != "tails_swapped":
            return good
        return dataclasses.replace(good, words=faults.with_two_tails_swapped(good))

    def poisoned_load(self, *args):
        # Entries that nobody writes point at the padding slot: an earlier scenario with the same
        # slots must not have left the right ones there.
        self.workspace.kv_indices.zero_()
        load(self, *args)

    def faulty_append(self, *args):
        if _read(fault_file) != "not_appended":
            append(self, *args)

    def faulty_stale(self, *args):
        cause = stale(self, *args)
        return None if _read(fault_file).endswith(f"ignore:{cause}") else cause

    def faulty_init(self, *args, agree, **kwargs):
        def faulty_agree(ok):
            # Each rank hears itself alone.
            return ok if _read(fault_file).endswith("no_agreement") else agree(ok)

        init(self, *args, agree=faulty_agree, **kwargs)

    preparer.PlanLifetime.stale = faulty_stale
    preparer.StepPreparer.__init__ = faulty_init
    for reader in READERS:
        _shorten_paths(reader, fault_file)
    build.Planner.plan_forest = faulty_plan
    build.RowTilePlanner.plan_forest = faulty_row_tile_plan
    packs.make_packs, row_tile_planner.make_tiles = faulty_packs, faulty_tiles
    build.PlanExecutor.load = poisoned_load
    build.PlanExecutor.append = faulty_append


def _shorten_paths(reader, fault_file: Path):
    read_paths = reader.read_paths

    def faulty(self, batch):
        paths = read_paths(self, batch)
        if _read(fault_file) == "tree_off_by_one" and len(paths.length):
            length = paths.length.copy()
            length[0] -= 1
            return dataclasses.replace(paths, length=length)
        return paths

    reader.read_paths = faulty
