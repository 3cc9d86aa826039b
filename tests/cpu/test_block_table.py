"""Shared prefixes found in a block table."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_prefix_attn.paths.block_tables import shared_paths, token_slots
from sgl_prefix_attn.plan.forest import build_forest
from tests.support.examples import examples
from tests.support.forests import chain


@st.composite
def block_tables(draw):
    """Rows that copy a prefix of an earlier row and go on with their own pages; junk behind."""
    page_size = draw(st.sampled_from([1, 2, 16]))
    rows, fresh = [], iter(range(1, 1000))
    for i in range(draw(st.integers(1, 8))):
        copied = []
        if i and draw(st.booleans()):
            source = draw(st.sampled_from(rows))
            copied = source[: draw(st.integers(0, len(source)))]
        own = draw(st.integers(0 if copied else 1, 4))
        rows.append(copied + [next(fresh) for _ in range(own)])
    lengths = [page_size * (len(r) - 1) + draw(st.integers(1, page_size)) for r in rows]
    width = max(map(len, rows)) + draw(st.integers(0, 2))
    junk = draw(st.sampled_from([0, -1, 7]))
    pages = np.array([r + [junk] * (width - len(r)) for r in rows], np.int32)
    return pages, np.array(lengths, np.int32), page_size


def common_pages(pages, seq_lens, page_size, a, b):
    """Leading pages that two requests have in common, the last page of each left out."""
    count = 0
    most = min((seq_lens[a] - 1) // page_size, (seq_lens[b] - 1) // page_size)
    while count < most and pages[a, count] == pages[b, count]:
        count += 1
    return count


def shared_tokens(paths, a, b):
    total = 0
    for x, y in zip(chain(paths, a), chain(paths, b), strict=False):
        if x != y:
            break
        total += int(paths.length[x])
    return total


@given(block_tables())
@examples(200)
def test_requests_share_exactly_their_common_pages(case):
    pages, seq_lens, page_size = case
    paths = shared_paths(pages, seq_lens, page_size)
    for a in range(seq_lens.size):
        for b in range(a):
            want = common_pages(pages, seq_lens, page_size, a, b) * page_size
            assert shared_tokens(paths, a, b) == want, (a, b)
        assert paths.length[chain(paths, a)].sum() < seq_lens[a]
    assert (paths.parent < np.arange(paths.parent.size)).all()
    assert (paths.length > 0).all()
    # every node is shared: the forest keeps them all
    assert build_forest(paths).parent.size == paths.parent.size


def test_token_slots():
    table = torch.tensor([[3, 0], [1, 5]], dtype=torch.int32)
    assert token_slots(table, 1) is table
    assert token_slots(table, 2).tolist() == [[6, 7, 0, 1], [2, 3, 10, 11]]


def test_a_page_that_makes_no_sense_stays_one():
    """In int32, page 2**28 of 16 tokens would be slot 0 again."""
    table = torch.tensor([[2**28]], dtype=torch.int32)
    assert token_slots(table, 16)[0, 5] == 2**32 + 5
