"""Tensor-parallel ranks agree over a real process group, or nothing is asked of it."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch.distributed
import torch.multiprocessing

from sgl_prefix_attn.engine.ranks import agreement, raise_unless_alike
from sgl_prefix_attn.settings import Settings


def runner(size, group=None):
    return SimpleNamespace(
        ps=SimpleNamespace(tp_size=size), tp_group=SimpleNamespace(cpu_group=group)
    )


def test_one_rank_decides_alone_and_needs_no_process_group():
    agree = agreement(runner(1))
    assert agree(True) and not agree(False)
    raise_unless_alike(Settings(), None)


@contextmanager
def two_ranks(index, store):
    """The process group of both, in the process of one."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=index, world_size=2
    )
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


def rank(index, store, says, results):
    with two_ranks(index, store) as group:
        agree = agreement(runner(2, group))
        results[index] = [agree(answers[index]) for answers in says]


@pytest.mark.timeout(120)
def test_every_rank_hears_of_a_fault_on_any(tmp_path):
    says = [(True, True), (True, False), (False, True), (False, False)]
    with torch.multiprocessing.Manager() as manager:
        results = manager.dict()
        torch.multiprocessing.spawn(rank, (tmp_path / "store", says, results), nprocs=2)
        assert dict(results) == {i: [True, False, False, False] for i in range(2)}


def compared(index, store, settings, results):
    said = []
    with two_ranks(index, store) as group:
        for each in settings:
            try:
                raise_unless_alike(each[index], group)
                said.append(None)
            except ValueError as error:
                said.append(str(error))
    results[index] = said


@pytest.mark.timeout(120)
def test_a_variable_that_is_not_the_same_on_all_ranks_is_named(tmp_path):
    few, stock = Settings(max_variant_bs=8), Settings(policy="stock")
    settings = [(few, few), (Settings(), few), (stock, Settings())]
    with torch.multiprocessing.Manager() as manager:
        results = manager.dict()
        arguments = (tmp_path / "store", settings, results)
        torch.multiprocessing.spawn(compared, arguments, nprocs=2)
        here, there = results[0], results[1]
    assert here == there and here[0] is None
    assert here[1].startswith("SGL_PREFIX_ATTN_MAX_VARIANT_BS differs between")
    assert here[1].endswith("65536, 8. Set it alike on every node")
    assert here[2].startswith("SGL_PREFIX_ATTN_POLICY differs")
