"""A test-only SGLang plugin: records every decode step and plants faults in the scheduler process.

engine.py puts a dist-info folder with its entry point on the engine's path. Steps are appended to
$PROBE_STEPS as JSON lines, with the tensor-parallel rank that made each; the fault to plant is read
from $PROBE_FAULT before each step, so that one engine serves many scenarios.
$PROBE_LORA_LABELS set: decode graphs are captured once for each of SGLang's LoRA labels.
$PROBE_HOPPER set: the server takes its kernels for Hopper's, which torch runs.
$PROBE_HOST_COPIES set: HiCache copies KV in torch, for it has no GPU.
$PROBE_UNPINNED set: LoRA takes host memory that is not pinned, for the same reason.
$PROBE_ROWS set: SGLang's batch-invariant mode, which needs a GPU, multiplies and draws row by row.
$PROBE_TORCH_LINEAR set: linear attention is run in torch.
$PROBE_TORCH_WINDOWS names SGLang's backends, joined by commas, that are torch's with windows of a
pool of their own, and sinks.
"""

import dataclasses
import json
import multiprocessing
import os
import time
from pathlib import Path

from sgl_prefix_attn.paths.radix_reader import RadixReader
from sgl_prefix_attn.paths.tree_reader import KvMapping
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
        if os.environ.get("PROBE_UNPINNED"):
            from tests.support.lora import unpin

            unpin()
        if os.environ.get("PROBE_ROWS"):
            from sglang.srt import batch_invariant_ops

            batch_invariant_ops.enable_batch_invariant_mode = _work_row_by_row
        if os.environ.get("PROBE_TORCH_LINEAR"):
            from tests.support import torch_linear

            torch_linear.install()
        if names := os.environ.get("PROBE_TORCH_WINDOWS"):
            from tests.support import torch_windows

            torch_windows.install(names.split(","))
        _record_steps(preparer, Path(steps), Path(fault_file))
        _record_extends(extend, Path(steps))
        _plant_faults(preparer, build, Path(fault_file))
        if os.environ.get("PROBE_HOPPER"):
            from tests.support.torch_hopper import as_on_hopper

            as_on_hopper()
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


def _work_row_by_row():
    import torch
    from sglang.srt.layers import sampler

    def by_row(multiply):
        def rows(x, *args, **kwargs):
            if x.dim() != 2 or len(x) < 2:
                return multiply(x, *args, **kwargs)
            return torch.cat([multiply(row, *args, **kwargs) for row in x.split(1)])

        return rows

    torch.nn.functional.linear = by_row(torch.nn.functional.linear)
    torch.matmul = by_row(torch.matmul)

    def draw(logprobs, seeds, positions):
        noise = torch.stack(
            [
                torch.rand(logprobs.shape[1], generator=torch.Generator().manual_seed(seed))
                for seed in (1_000_003 * seeds + positions.view(-1)).tolist()
            ]
        )
        return (logprobs - noise.log().neg().log()).argmax(1, keepdim=True)

    sampler.multinomial_with_seed = draw


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
    _note_calls(KvMapping, "of", read)
    nth_step = {}

    def recorded(self, batch):
        time.sleep(PACE_S)
        read.clear()
        before = dict(self.counters.plans)
        fault = _read(fault_file)
        nth = nth_step[fault] = nth_step.get(fault, -1) + 1
        if nth == 0:
            # What stands is of the scenario before.
            decision, _ = self._standing
            self._standing = decision, 0
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
        record = {"extend": query_lens.tolist(), **_outcome(step, self.counters)}
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
    import torch

    from eval.compare_outputs import faults
    from sgl_prefix_attn.execute import row_sums
    from sgl_prefix_attn.plan import search
    from tests.support.multi_token import CHAIN_FAULTS

    make_tiles, plan = search.make_tiles, build.Planner.plan_forest
    load, append = build.PlanExecutor.load, build.PlanExecutor.append
    run, over = build.PlanExecutor.run, row_sums.RowSums.over
    stale, init = preparer.PlanLifetime.stale, preparer.StepPreparer.__init__
    nth_plan = {}

    def faulty_plan(self, forest, before=None):
        fault = _read(fault_file)
        nth = nth_plan[fault] = nth_plan.get(fault, -1) + 1
        if _fails_to_plan(fault, nth):
            raise ZeroDivisionError("planted")
        # Where chains are verified over plans, plans of one query a request are of draft steps.
        drafts = fault == "draft_node_dropped" and forest.query_lens is None
        if fault == "shared_node_dropped" or drafts:
            forest = faults.without_largest_node(forest)
        good, change = plan(self, forest, before), CHAIN_FAULTS.get(fault)
        if change is None or forest.query_lens is None or forest.query_lens.max() < 3:
            return good
        words = good.words.copy()
        change(words)
        return dataclasses.replace(good, words=words)

    def faulty_tiles(forest, *args):
        good = make_tiles(forest, *args)
        if _read(fault_file) != "tails_swapped":
            return good
        run = faults.with_two_tail_runs_swapped(forest, good.run)
        return dataclasses.replace(good, run=run)

    def poisoned_load(self, *args):
        # Entries that nobody writes point at the padding slot: an earlier scenario with the same
        # slots must not have left the right ones there.
        self.workspace.kv_indices.zero_()
        load(self, *args)

    def faulty_append(self, *args):
        if _read(fault_file) != "not_appended":
            append(self, *args)

    def faulty_run(self, layer):
        if _read(fault_file) == "without_sinks":
            layer = dataclasses.replace(layer, sinks=None)
        run(self, layer)

    def faulty_stale(self, *args):
        cause = stale(self, *args)
        return None if _read(fault_file).endswith(f"ignore:{cause}") else cause

    def faulty_init(self, *args, agree=lambda ok: ok, **kwargs):
        def faulty_agree(ok):
            # Each rank hears itself alone.
            return ok if _read(fault_file).endswith("no_agreement") else agree(ok)

        init(self, *args, agree=faulty_agree, **kwargs)

    def faulty_over(self, logits, v):
        if _read(fault_file) == "maxima_of_the_item":  # rows are rescaled together
            top = torch.maximum(self.top, logits.amax())
            shrink = torch.exp(self.top - top)
            self = row_sums.RowSums(self.acc * shrink[..., None], top, self.total * shrink)
        return over(self, logits, v)

    row_sums.RowSums.over = faulty_over
    preparer.PlanLifetime.stale = faulty_stale
    preparer.StepPreparer.__init__ = faulty_init
    for reader in READERS:
        _shorten_paths(reader, fault_file)
    build.Planner.plan_forest = faulty_plan
    search.make_tiles = faulty_tiles
    build.PlanExecutor.load = poisoned_load
    build.PlanExecutor.append, build.PlanExecutor.run = faulty_append, faulty_run


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
