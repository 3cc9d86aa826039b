"""Faults planted into a plan's words: every check of plans and of kernels must find each."""

from eval.compare_outputs import faults
from sgl_prefix_attn import plan as plan_module
from sgl_prefix_attn.execute.executor import PlanExecutor
from sgl_prefix_attn.kernels import layout as L
from sgl_prefix_attn.plan import row_tile_planner
from sgl_prefix_attn.records import Plan
from tests.support.forests import path_table
from tests.support.plan_words import items, merge_entries, segments


def tree():
    """On the small tiles of forests.planner(..., "naive") every fault below changes its plan."""
    return path_table([(-1, 130), (0, 40)], [1, 1, 0, 1, -1], [33, 33, 60, 35, 36])


def drop_item(plan: Plan) -> None:
    """The last item of the last shared queue goes missing."""
    tile = max(t for t, queue in items(plan) if len(queue))
    plan.words[L.H_QUEUES + 2 * tile + 1] -= 1


def swap_tails(plan: Plan) -> None:
    tails = plan.words[plan.words[L.H_TAILS] :]
    tails[[L.T_DST, L.TAIL_WORDS + L.T_DST]] = tails[[L.TAIL_WORDS + L.T_DST, L.T_DST]]


def skip_first_tail_token(plan: Plan) -> None:
    plan.words[plan.words[L.H_TAILS] :][L.T_START] += 1


def skip_last_shared_token(plan: Plan) -> None:
    for _, queue in items(plan):
        queue[queue[:, L.I_LEN] != L.GROWS, L.I_LEN] -= 1


def shift_segment(plan: Plan) -> None:
    segments(plan.words)[0, L.S_START] += 1


def segment_of_another_request(plan: Plan) -> None:
    segments(plan.words)[-1, L.S_ROW] = 0


def overlap_segments(plan: Plan) -> None:
    segments(plan.words)[1, L.S_DST] -= 16


def repeat_split(plan: Plan) -> None:
    """A split job's first item computes the second one's stretch."""
    item = next(i for _, queue in items(plan) for i in queue if i[L.I_NUM_SPLITS] > 1)
    item[L.I_SPLIT] = (item[L.I_SPLIT] + 1) % item[L.I_NUM_SPLITS]


def merge_one_too_few(plan: Plan) -> None:
    merge_entries(plan.words)[0, L.M_COUNT] -= 1


def merge_partials_of_the_next_row(plan: Plan) -> None:
    merge_entries(plan.words)[0, L.M_PARTIAL] += 1


def merge_another_rows_partials(plan: Plan) -> None:
    merges = merge_entries(plan.words)
    merges[[0, 1], L.M_ROW] = merges[[1, 0], L.M_ROW]


def write_the_same_partial(plan: Plan) -> None:
    first = plan.words[L.H_ENTRIES] + L.E_PARTIAL
    plan.words[first + L.ENTRY_WORDS] = plan.words[first]


FAULTS = [
    drop_item, swap_tails, skip_first_tail_token, skip_last_shared_token, shift_segment,
    segment_of_another_request, overlap_segments, repeat_split, merge_one_too_few,
    merge_partials_of_the_next_row, merge_another_rows_partials, write_the_same_partial,
]  # fmt: skip


def plant(patch, fault: str) -> list[str]:
    """Plant a fault of the evaluation until the end of a test; a list that grows each time it takes
    effect."""
    for owner, name in (
        (plan_module, "make_packs"),
        (plan_module.Planner, "plan_forest"),
        (row_tile_planner, "make_tiles"),
        (PlanExecutor, "append"),
    ):
        patch.setattr(owner, name, getattr(owner, name))  # undone at the end
    planted: list[str] = []
    faults.FAULTS[fault](lambda: planted.append(fault))
    return planted
