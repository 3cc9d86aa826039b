"""Tensor-parallel ranks agree over a real process group, or nothing is asked of it."""

import pytest
import torch.distributed
import torch.multiprocessing

from sgl_prefix_attn.engine import sglang_config
from sgl_prefix_attn.engine.ranks import agreement, of_first_rank, raise_unless_alike
from sgl_prefix_attn.settings import Settings
from tests.support.parallel import ranks


def test_one_rank_decides_alone_and_needs_no_process_group(monkeypatch):
    monkeypatch.setattr(sglang_config, "parallel", ranks)
    agree = agreement()
    assert agree(True) and not agree(False)
    raise_unless_alike(Settings(), None)
    assert of_first_rank(lambda: "mine") == "mine"


def rank(index, store, says, settings, results):
    """What rank `index` of two heard of the others' faults, and of their settings."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=index, world_size=2
    )
    sglang_config.parallel = lambda: ranks(2, torch.distributed.group.WORLD)  # of this process
    agree = agreement()
    heard = [agree(answers[index]) for answers in says]
    heard.append(of_first_rank(lambda: f"rank {index}"))
    for each in settings:
        try:
            raise_unless_alike(each[index], torch.distributed.group.WORLD)
            heard.append(None)
        except ValueError as error:
            heard.append(str(error))
    results[index] = heard
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_every_rank_hears_of_a_fault_and_of_another_variable_on_any(tmp_path):
    says = [(True, True), (True, False), (False, True), (False, False)]
    few, stock = Settings(max_variant_bs=8), Settings(policy="stock")
    settings = [(few, few), (Settings(), few), (stock, Settings())]
    with torch.multiprocessing.Manager() as manager:
        results = manager.dict()
        arguments = (tmp_path / "store", says, settings, results)
        torch.multiprocessing.spawn(rank, arguments, nprocs=2)
        here, there = results[0], results[1]
    assert here == there and here[:6] == [True, False, False, False, "rank 0", None]
    assert here[6].startswith("PREFIX_ATTN_MAX_VARIANT_BS differs between")
    assert here[6].endswith("65536, 8. Set it alike on every node")
    assert here[7].startswith("PREFIX_ATTN_POLICY differs")
