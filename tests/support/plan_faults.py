"""Faults of the evaluation, planted until the end of a test: every comparison must find each."""

from eval.compare_outputs import faults
from sgl_prefix_attn.execute.executor import PlanExecutor
from sgl_prefix_attn.plan import planner, search


def plant(patch, fault: str) -> list[str]:
    """Plant a fault; returns a list that grows each time it takes effect."""
    for owner, name in (
        (planner.Planner, "plan_forest"),
        (search, "make_tiles"),
        (PlanExecutor, "append"),
    ):
        patch.setattr(owner, name, getattr(owner, name))  # undone at the end
    planted: list[str] = []
    faults.FAULTS[fault](lambda: planted.append(fault))
    return planted
