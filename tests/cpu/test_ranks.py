"""Tensor-parallel ranks agree over a real process group, or nothing is asked of it."""

from types import SimpleNamespace

import pytest
import torch.distributed
import torch.multiprocessing

from sgl_prefix_attn.ranks import agreement


def runner(size, group=None):
    return SimpleNamespace(
        ps=SimpleNamespace(tp_size=size), tp_group=SimpleNamespace(cpu_group=group)
    )


def test_one_rank_decides_alone_and_needs_no_process_group():
    agree = agreement(runner(1))
    assert agree(True) and not agree(False)


def rank(index, store, says, results):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=index, world_size=2
    )
    agree = agreement(runner(2, torch.distributed.group.WORLD))
    results[index] = [agree(answers[index]) for answers in says]
    torch.distributed.destroy_process_group()


@pytest.mark.timeout(120)
def test_every_rank_hears_of_a_fault_on_any(tmp_path):
    says = [(True, True), (True, False), (False, True), (False, False)]
    with torch.multiprocessing.Manager() as manager:
        results = manager.dict()
        torch.multiprocessing.spawn(rank, (tmp_path / "store", says, results), nprocs=2)
        assert dict(results) == {i: [True, False, False, False] for i in range(2)}
