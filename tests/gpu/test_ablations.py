"""Every ablation of row tiles on a Hopper GPU is right, with the merge inside or of its own."""

import pytest
import torch

from eval.ablate.__main__ import ablate
from eval.ablate.ablations import ABLATIONS
from eval.bench_kernel.case import build_case
from eval.bench_kernel.trees import Tree
from sgl_prefix_attn.execute.backends.choice import why_no_row_tiles
from sgl_prefix_attn.records import HeadConfig
from tests.support.gpu_problems import DEVICE

HEADS = [HeadConfig(32, 8, 128), HeadConfig(28, 4, 128)]


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("tree", ["1,10_4096,416", "1,4,37_300,63,130", "5_1000"])
def test_every_ablation_is_right(tree, heads):
    device = torch.device(DEVICE)
    if why_no_row_tiles(device, heads, torch.bfloat16) is not None:
        pytest.skip("the row-tile kernel is for sm_90")
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    case = build_case(Tree.parse(tree), heads, 1, torch.bfloat16, device, 0)
    rows = ablate(case, num_sms, list(ABLATIONS), floor=1.0)
    assert [row["ablation"] for row in rows if row["problem"]] == []
    launches = {row["ablation"]: row["launches"] for row in rows}
    assert launches["calibrated"] == 1 and launches["separate_merge"] == 2
