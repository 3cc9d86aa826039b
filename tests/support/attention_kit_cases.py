"""Cases for SGLang's attention kit: its own, which share nothing, and some that share slots."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from tests.support.attention_kit import NOTHING, dense
from tests.support.shared_rows import Sharing

DECODE, EXTEND, VERIFY = (dense.ForwardMode[n] for n in ("DECODE", "EXTEND", "TARGET_VERIFY"))
DRAFT = 3  # tokens of a chain


@dataclass(frozen=True)
class Layout:
    """Requests that share slots.

    own    cached tokens of each request behind those that it shares
    heads  query heads, KV heads
    """

    sharing: Sharing
    own: tuple[int, ...]
    heads: tuple[int, int] = (28, 4)
    page_size: int = 1

    def case(self, mode, new: tuple[int, ...] | None = None):
        """Make a case of the kit; new: tokens of each request in an extend or verify batch."""
        if new is None and mode == EXTEND:
            new = tuple(1 + i % 7 for i in range(len(self.own)))
        elif new is None:
            new = (DRAFT,) * len(self.own)
        return dense.DenseAttentionCase(
            name=f"shared_{mode.name.lower()}",
            backend="prefix",
            forward_mode=mode,
            num_heads=self.heads[0],
            num_kv_heads=self.heads[1],
            page_size=self.page_size,
            prefix_lens=tuple(self.sharing.tokens(i) + n for i, n in enumerate(self.own)),
            extend_lens=() if mode == DECODE else new,
        )


SHORT = Layout(Sharing(((-1, 5),), (0, 0)), (2, 2))
LAYOUTS = {
    "short": SHORT,
    "pair": Layout(Sharing(((-1, 16),), (0, 0)), (0, 5), (4, 2), 16),
    "family": Layout(
        Sharing(((-1, 32), (0, 16), (0, 48)), (1, 1, 2, 0, -1, 2, 1)),
        (0, 1, 16, 17, 33, 0, 15),
        page_size=16,
    ),
    "batch_1": Layout(Sharing(((-1, 63),), (0,)), (1,), (7, 1)),
    "batch_37": Layout(Sharing(((-1, 63),), (0,) * 37), tuple(i % 5 for i in range(37)), (14, 2)),
    "lengths_1_63": Layout(NOTHING, (0, 62, 0), (4, 1)),
}


def _chains(case):
    """The kit has decode cases for all modes of decoding, and none of verification."""
    return replace(case, forward_mode=VERIFY, extend_lens=(DRAFT,) * case.batch_size)


def cases(mode) -> list:
    """pytest.param(sharing, case) of the kit's own cases and of ours."""
    own = [
        c
        for c in dense.make_dense_cases("prefix")
        if (c.forward_mode == EXTEND) == (mode == EXTEND)
    ]
    own = [_chains(case) if mode == VERIFY else case for case in own]
    return [pytest.param(NOTHING, case, id=f"kit-{case.name}") for case in own] + [
        pytest.param(layout.sharing, layout.case(mode), id=f"shared-{name}")
        for name, layout in LAYOUTS.items()
    ]
