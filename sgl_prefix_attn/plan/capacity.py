"""How much workspace plans may use: what a server allocates once and plans must keep within."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from sgl_prefix_attn.plan.plan import Plan
from sgl_prefix_attn.records import PlanTooLarge


@dataclass(frozen=True)
class Capacity:
    """Sizes of an executor's fixed workspace.

    words        int32 words of a plan, 4 bytes each
    index_slots  entries of its blocks, 8 bytes each: a KV slot and a key
    partials     rows of q whose partial results there is room for, num_qo_heads * (value_dim *
                 dtype size + 8) bytes each
    """

    words: int
    index_slots: int
    partials: int

    @classmethod
    def for_plans(cls, *plans: Plan) -> Capacity:
        """Return enough for each of the plans, one at a time."""
        return cls(
            words=max(plan.words.size for plan in plans),
            index_slots=max(plan.num_index_slots for plan in plans),
            partials=max(1, *(plan.num_partials for plan in plans)),
        )

    def grown_to(self, need: Capacity) -> Capacity:
        """Return at least `need`, in powers of two so that growing stays rare."""
        both = zip(astuple(self), astuple(need), strict=True)
        return Capacity(*(max(have, 1 << (want - 1).bit_length()) for have, want in both))

    def covers(self, plan: Plan) -> bool:
        """Tell whether a workspace of this size holds the plan."""
        return (
            plan.words.size <= self.words
            and plan.num_index_slots <= self.index_slots
            and plan.num_partials <= self.partials
        )

    def check(self, plan: Plan) -> None:
        """Raise PlanTooLarge unless a workspace of this size holds the plan."""
        if not self.covers(plan):
            raise PlanTooLarge(
                f"the plan needs {plan.words.size} words, {plan.num_index_slots} index slots and "
                f"{plan.num_partials} partial rows; the workspace has {self}"
            )


# Where the workspace grows with the plans: kernels count index slots in 32 bits.
UNLIMITED = Capacity(words=1 << 62, index_slots=(1 << 31) - 1, partials=1 << 62)
