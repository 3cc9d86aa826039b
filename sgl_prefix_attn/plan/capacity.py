"""How much workspace plans may use: what a server allocates once and plans must keep within."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from sgl_prefix_attn.kernels import layout
from sgl_prefix_attn.plan.tiles import TileSet
from sgl_prefix_attn.records import HeadConfig, PlanTooLarge, StepPlan


@dataclass(frozen=True)
class Capacity:
    """Sizes of an executor's fixed workspace.

    Memory is 4 bytes per word, 4 per index slot (row tiles: 8), and num_qo_heads * (head_dim *
    dtype size + 8) bytes per partial row.
    """

    words: int
    index_slots: int
    partials: int

    @classmethod
    def for_server(
        cls, max_batch: int, max_tokens: int, headroom: int, tile_set: TileSet, heads: HeadConfig
    ) -> Capacity:
        """Return enough for a plan of any max_batch requests over max_tokens KV slots.

        Partial rows and index slots are those of any balanced forest (balance.py), plus headroom
        and alignment for every request, plus rows for splits: of long KV for few query heads most
        of a tile's rows on every CTA. A planner with this capacity keeps within it.
        """
        levels = max_batch.bit_length()  # 1 + log2
        ctas = 4 * tile_set.num_sms
        tile_requests = tile_set.shared[-1].block_m // heads.num_qo_heads
        partials = max(8, levels) * max_batch + max(2, tile_requests) * ctas
        # Every part is an entry and at most an item; each of the at most 2 * max_batch packs is a
        # segment.
        parts = partials + max_batch
        return cls(
            words=layout.HEADER_WORDS
            + (2 * layout.SEGMENT_WORDS + layout.TAIL_WORDS + layout.MERGE_WORDS) * max_batch
            + (layout.ENTRY_WORDS + layout.ITEM_WORDS) * parts,
            index_slots=max(2, levels) * max_tokens + (headroom + 32) * max_batch,
            partials=partials,
        )

    @classmethod
    def for_plans(cls, *plans: StepPlan) -> Capacity:
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

    def covers(self, plan: StepPlan) -> bool:
        """Tell whether a workspace of this size holds the plan."""
        return (
            plan.words.size <= self.words
            and plan.num_index_slots <= self.index_slots
            and plan.num_partials <= self.partials
        )

    def check(self, plan: StepPlan) -> None:
        """Raise PlanTooLarge unless a workspace of this size holds the plan."""
        if not self.covers(plan):
            raise PlanTooLarge(
                f"the plan needs {plan.words.size} words, {plan.num_index_slots} index slots and "
                f"{plan.num_partials} partial rows; the workspace has {self}"
            )


# Where the workspace grows with the plans.
UNLIMITED = Capacity(words=1 << 62, index_slots=1 << 62, partials=1 << 62)
