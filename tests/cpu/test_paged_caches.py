"""Caches of pages: read where slots are a view of them, refused by name where they are not."""

from dataclasses import replace

import pytest
import torch

from sgl_prefix_attn.records import HeadConfig
from tests.support.forests import path_table
from tests.support.multi_token import multi_token
from tests.support.problems import assert_attention, make_problem
from tests.support.running import planned_several, planned_wrapper

HEADS = HeadConfig(14, 2, 32)
PATHS = path_table([(-1, 32), (0, 16)], [0, 1, 1, -1], [3, 17, 40, 1])


def problem(page_size, heads=HEADS):
    """Whole pages of slots."""
    made = make_problem(PATHS, heads, page_size=page_size)
    rest = -made.k.shape[0] % page_size
    empty = made.k.new_full((rest, *made.k.shape[1:]), float("nan"))
    return replace(made, k=torch.cat([made.k, empty]), v=torch.cat([made.v, empty]))


def pages(cache, page_size):
    return cache.view(-1, page_size, *cache.shape[1:])


def attend(made, page_size, k, v):
    wrapper = planned_wrapper(made, page_size=page_size)
    out, lse = wrapper.run(made.q, (k, v), return_lse=True)
    assert_attention(made, out, lse.values)


def heads_first(cache):
    """[pages, Hkv, page_size, D] over memory of [pages, page_size, Hkv, D]."""
    return cache.transpose(1, 2)


def interleaved(k, v):
    return torch.stack([k, v], 1).unbind(1)


@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize("heads", [HEADS, HeadConfig(7, 1, 32)], ids=str)
def test_pages_are_read_as_their_slots(page_size, heads):
    made = problem(page_size, heads)
    k, v = (pages(cache, page_size) for cache in (made.k, made.v))
    attend(made, page_size, k, v)
    k, v = (heads_first(heads_first(cache)) for cache in (k, v))
    attend(made, page_size, k, v)


@pytest.mark.parametrize(("page_size", "heads"), [(1, HEADS), (16, HeadConfig(7, 1, 32))], ids=str)
def test_heads_first_is_the_same_memory_where_there_is_one_head_or_one_token(page_size, heads):
    made = problem(page_size, heads)
    k, v = (heads_first(pages(cache, page_size)).contiguous() for cache in (made.k, made.v))
    attend(made, page_size, heads_first(k), heads_first(v))


def test_slots_may_be_apart():
    """K and V side by side in each slot: one stride leads from slot to slot."""
    made = problem(16)
    both = torch.stack([made.k, made.v], 1)
    k, v = (pages(both, 16)[:, :, i] for i in range(2))
    attend(made, 16, k, v)


def test_several_query_tokens():
    asked = multi_token(PATHS, [1, 2, 7, 1], HEADS, torch.float32, page_size=16)
    queries = asked.queries
    wrapper = planned_several(asked, page_size=16)
    k, v = (pages(torch.cat([c, c[: -c.shape[0] % 16]]), 16) for c in (queries.k, queries.v))
    out, lse = wrapper.run(queries.q, (k, v), return_lse=True)
    assert_attention(queries, out, lse.values)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda k: heads_first(k), r"got .*; of \[pages, heads, page_size.* \[?kv_cache"),
        (lambda k: heads_first(heads_first(k).contiguous()), "heads side by side in memory"),
        (lambda k: interleaved(k, k)[0], "pages one behind the other in memory"),
        (lambda k: k[:, :8], r"must have shape \(pages, 16, heads, head_dim\)"),
        (lambda k: k[..., :16], "side by side in memory"),
        (lambda k: k.flatten(0, 1)[None, None], "must have shape"),
    ],
)
@pytest.mark.parametrize("place", [0, 1])
def test_what_is_no_view_is_refused_by_name(spoil, says, place):
    made = problem(16)
    caches = [pages(made.k, 16), pages(made.v, 16)]
    wrapper = planned_wrapper(made, page_size=16)
    caches[place] = spoil(caches[place])
    with pytest.raises(ValueError, match=says) as error:
        wrapper.run(made.q, caches)
    assert str(error.value).startswith(f"kv_cache[{place}] ")
