"""How the row-tile kernel is launched behind what writes its words, slots and keys."""

import pytest
import torch

from sgl_prefix_attn.execute.backends import hopper_backend, kernel_backend
from sgl_prefix_attn.execute.executor import PlanExecutor
from sgl_prefix_attn.execute.params import Capacity, LayerParams
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.records import HeadConfig
from tests.support.forests import path_table

HEADS = HeadConfig(8, 2, 64)
CPU = torch.device("cpu")
PATHS = path_table([(-1, 130)], [0, 0, 0], [70, 1, 63])


class Recorder:
    """Stands for a kernel: notes what it is launched with."""

    def __init__(self, name, launches):
        self.name, self.launches = name, launches

    def __getitem__(self, grid):
        return lambda *args, **options: self.launches.append((self.name, options))


@pytest.fixture
def launches(monkeypatch):
    found = []
    monkeypatch.setattr(hopper_backend, "row_tile_kernel", Recorder("row_tile_kernel", found))
    for name in ("fill_blocks_kernel", "append_token_kernel"):
        monkeypatch.setattr(kernel_backend, name, Recorder(name, found))
    return found


@pytest.mark.parametrize("pdl", [False, True])
def test_the_first_launch_behind_a_writer_is_in_full_order(pdl, launches):
    """Nothing else orders what append and fill wrote before what a dependent launch reads early."""
    backend = hopper_backend.HopperBackend(HEADS, torch.float16, CPU, pdl=pdl)
    plan = Planner(HEADS, num_sms=backend.num_sms, headroom=2).plan(PATHS)
    q, kv, lens = torch.zeros(3, 8, 64), torch.zeros(9, 2, 64), torch.ones(3)
    executor, other = (PlanExecutor(backend, Capacity.for_plans(plan)) for _ in range(2))

    def dependent():
        """Whether each of three layers is launched as a dependent of what is before it."""
        launches.clear()
        for _ in range(3):
            executor.run(LayerParams(q, kv, kv, q, None, 0.1, 0.0))
        assert [name for name, _ in launches] == 3 * ["row_tile_kernel"]
        assert all(options["PDL"] == pdl for _, options in launches), "what waits is one kernel"
        return [options["launch_pdl"] for _, options in launches]

    table, pool = torch.zeros(3, 256, dtype=torch.int32), torch.arange(3)
    executor.load(plan, table, pool)
    assert dependent() == [False, pdl, pdl]
    assert dependent() == [pdl, pdl, pdl], "nothing was written since"
    executor.append(lens, pool)
    assert dependent() == [False, pdl, pdl]
    other.load(plan, table, pool)  # another plan's words, but its launches are not told apart
    assert dependent() == [False, pdl, pdl]
