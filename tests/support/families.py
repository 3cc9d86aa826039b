"""Both families of kernels, as tests drive them on a GPU."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from sgl_prefix_attn.execute.backends.choice import why_no_row_tiles
from sgl_prefix_attn.execute.backends.gluon_backend import GluonBackend
from sgl_prefix_attn.execute.executor import PlanExecutor
from sgl_prefix_attn.execute.params import Capacity
from sgl_prefix_attn.kernels import layout as L
from sgl_prefix_attn.kernels.gluon import words as W
from sgl_prefix_attn.plan.row_tile_planner import RowTilePlanner
from tests.support import gpu_problems, running


class Family(NamedTuple):
    """planner(headroom) for LLAMA's heads; executor(problem, *plans) over poisoned memory;
    newest(plan, seq_lens): entries int64 [B] of kv_indices for tokens appended at seq_lens - 1."""

    planner: Callable
    executor: Callable
    newest: Callable


def _row_tile_planner(headroom=20):
    device = torch.device(gpu_problems.DEVICE)
    if why_no_row_tiles(device, gpu_problems.LLAMA, torch.bfloat16) is not None:
        pytest.skip("the row-tile kernel is for sm_90")
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return RowTilePlanner(gpu_problems.LLAMA, num_sms=num_sms, headroom=headroom)


def row_tile_executor(problem, *plans):
    backend = GluonBackend(problem.heads, problem.dtype, problem.q.device)
    made = PlanExecutor(backend, Capacity.for_plans(*plans))
    running.poison(made, problem)
    made.workspace.keys.fill_(-1)
    return made


def _newest_of_packs(plan, seq_lens):
    tails = plan.words[plan.words[L.H_TAILS] :][: plan.batch_size * L.TAIL_WORDS]
    tails = torch.from_numpy(tails.reshape(-1, L.TAIL_WORDS)).long()
    return tails[:, L.T_DST] + seq_lens.cpu().long() - 1 - tails[:, L.T_START]


def newest_of_row_tiles(plan, seq_lens):
    words = torch.from_numpy(plan.words).long()
    growths = words[words[W.H_GROWTHS] :][: plan.batch_size * W.GROWTH_WORDS]
    growths = growths.view(-1, W.GROWTH_WORDS)
    step = seq_lens.cpu().long() - growths[:, W.G_LEN]
    column = (step - 1) * growths[:, W.G_GROWING] + growths[:, W.G_INDEX]
    return words[growths[:, W.G_ORDER] + column // W.BLOCK] * W.BLOCK + column % W.BLOCK


def _packs(parallel_tiles):
    return Family(
        lambda headroom=20: gpu_problems.planner(headroom=headroom),
        lambda *args: running.executor(*args, parallel_tiles=parallel_tiles),
        _newest_of_packs,
    )


FAMILIES = {
    "parallel_tiles": _packs(True),
    "serial_tiles": _packs(False),
    "row_tiles": Family(_row_tile_planner, row_tile_executor, newest_of_row_tiles),
}
