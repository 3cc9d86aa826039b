"""Calibration batches, and how much work they are for FlashInfer."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_prefix_attn.predict.stock_time import SHORTEST_PIECE, stock_kernel, stock_work
from sgl_prefix_attn.records import HeadConfig
from sgl_prefix_attn.tools.calibrate.batches import (
    LENGTHS,
    MAX_BATCH,
    SHARING,
    SHORTEST,
    draw,
    prefix_lens,
)
from tests.support.examples import examples
from tests.support.forests import chain

POOL = 200_000
COUNT = 200


@pytest.fixture(scope="module")
def batches():
    return draw(3, COUNT, POOL)


def equal(a, b) -> bool:
    return all(
        np.array_equal(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True)
    )


@pytest.mark.parametrize("page_size", [1, 16])
def test_batches_fit_the_pool_with_page_rounding(page_size):
    for batch in draw(1, 60, POOL, page_size):
        private = batch.paths.seq_lens - prefix_lens(batch.paths)
        assert (private >= 1).all() and 1 <= batch.size <= MAX_BATCH
        assert not (batch.paths.length % page_size).any()
        pages = -(-np.concatenate([batch.paths.length, private]).astype(int) // page_size)
        assert pages.sum() * page_size <= POOL


def test_every_family_occurs_equally_often(batches):
    names = [batch.name for batch in batches]
    families = {f"{lengths}/{sharing}" for lengths in LENGTHS for sharing in SHARING}
    assert {names.count(family) for family in families} == {COUNT // len(families)}
    assert set(names) == families


def test_what_is_shared(batches):
    """From nothing to 95 % and more of what a query-centric kernel reads."""
    for batch in batches:
        shares = "none" not in batch.name
        assert (batch.shared_share > 0) is shares
        assert (batch.paths.length.size > 0) is shares
        if not shares:
            assert batch.paths.seq_lens.min() >= SHORTEST
    shared = [batch.shared_share for batch in batches if "none" not in batch.name]
    assert min(shared) < 0.1 and max(shared) > 0.85
    depths = [len(chain(b.paths, 0)) for b in batches if "levels" in b.name]
    assert set(depths) == {2, 3, 4}


def test_sizes_and_lengths_span_their_ranges(batches):
    sizes = [batch.size for batch in batches]
    assert min(sizes) <= 3 and max(sizes) > 150
    longest = [int(batch.paths.seq_lens.max()) for batch in batches]
    assert min(longest) < 300 and max(longest) > 30_000


def test_the_same_seed_gives_the_same_batches(batches):
    again, other = draw(3, COUNT, POOL), draw(4, 20, POOL)
    assert all(equal(a.paths, b.paths) for a, b in zip(batches, again, strict=True))
    assert not any(equal(a.paths, b.paths) for a, b in zip(batches, other, strict=False))
    longer = draw(3, COUNT + 1, POOL)
    assert equal(longer[COUNT - 1].paths, batches[-1].paths)


def test_a_pool_too_small_is_refused():
    with pytest.raises(ValueError, match="pool_tokens 2048 is too small for .* requests"):
        draw(0, 20, 2048)


@pytest.mark.parametrize(
    ("heads", "rows", "ctas", "tile"),
    [
        ((32, 32, 128), 0, 6, 32),
        ((32, 32, 64), 0, 6, 64),
        ((16, 8, 128), 0, 8, 8),
        ((24, 8, 128), 0, 8, 6),
        ((16, 8, 256), 0, 8, 4),
        ((24, 8, 256), 0, 8, 3),
        ((32, 8, 128), 16, 2, 128),
        ((32, 8, 64), 16, 2, 256),
        ((16, 1, 256), 16, 2, 64),
        ((17, 1, 128), 64, 2, 128),
        ((65, 1, 128), 128, 2, 128),
        ((32, 8, 20000), 16, 2, 1),  # never 0, however little sense it makes
        ((2, 1, 20000), 0, 8, 2),
    ],
)
def test_stock_kernels(heads, rows, ctas, tile):
    """As FlashInfer 0.6 dispatches: BatchDecodeWithPagedKVCacheDispatched, FA2DetermineCtaTileQ."""
    kernel = stock_kernel(HeadConfig(*heads))
    assert (kernel.rows, kernel.ctas, kernel.tile) == (rows, ctas, tile)


def plain_stock_work(lens, num_sms, num_kv_heads, kernel):
    """FlashInfer's rule in plain Python: the smallest piece with which all pieces run at once,
    then each piece of each head in turn on the CTA that is free first."""
    slots = max(1, kernel.ctas * num_sms // num_kv_heads)
    longest = max(*lens, SHORTEST_PIECE)
    fitting = [
        piece
        for piece in range(SHORTEST_PIECE, longest + 1)
        if sum(math.ceil(n / piece) for n in lens) <= slots
    ]
    piece = fitting[0] if fitting else longest
    parts = [min(piece, n - start) for n in lens for start in range(0, n, piece)]
    free = [0] * (kernel.ctas * num_sms)
    for part in parts * num_kv_heads:
        first = free.index(min(free))
        free[first] += math.ceil(part / kernel.tile) * kernel.tile + kernel.piece
    return len(parts), max(free)


def plain_shares(lens, num_sms, num_kv_heads, kernel):
    """FlashAttention 3's rule in plain Python: an SM's share of all tiles and a tenth more bounds a
    piece; pieces of a request are as long as each other, to a tile, but for the last."""
    tiles = [math.ceil(n / kernel.tile) for n in lens]
    share = max(1, math.ceil(1.1 * sum(tiles) * num_kv_heads / num_sms))
    parts = []
    for n in tiles:
        each = math.ceil(n / math.ceil(n / share))
        parts += [min(each, n - start) for start in range(0, n, each)]
    free = [0] * num_sms
    for part in parts * num_kv_heads:
        free[free.index(min(free))] += part * kernel.tile + kernel.piece
    return len(parts), max(free)


@examples(60)
@given(
    lens=st.lists(st.integers(1, 3000), min_size=1, max_size=12),
    num_sms=st.integers(1, 12),
    num_kv_heads=st.sampled_from([1, 2, 4]),
    head_dim=st.sampled_from([64, 128, 256]),
)
def test_work_of_fa3(lens, num_sms, num_kv_heads, head_dim):
    heads = HeadConfig(4 * num_kv_heads, num_kv_heads, head_dim)
    work = stock_work(np.array(lens, np.int32), 33, num_sms, heads, "fa3")
    plain = plain_shares(lens, num_sms, num_kv_heads, stock_kernel(heads, "fa3"))
    assert (work.pieces, work.chain) == plain
    assert (work.batch_size, work.tokens, work.unique) == (len(lens), sum(lens), 33)


@examples(60)
@given(
    lens=st.lists(st.integers(1, 900), min_size=1, max_size=12),
    num_sms=st.integers(1, 12),
    num_kv_heads=st.sampled_from([1, 2, 4]),
    group=st.sampled_from([1, 2, 4]),
)
def test_stock_work(lens, num_sms, num_kv_heads, group):
    lens = [*lens, 40]
    heads = HeadConfig(num_kv_heads * group, num_kv_heads, 128)
    work = stock_work(np.array(lens, np.int32), 33, num_sms, heads)
    plain = plain_stock_work(lens, num_sms, num_kv_heads, stock_kernel(heads))
    assert (work.pieces, work.chain) == plain
    assert (work.batch_size, work.tokens, work.unique) == (len(lens), sum(lens), 33)
