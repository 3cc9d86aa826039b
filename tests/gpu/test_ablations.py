"""Plans by cuts that the planner would not choose, and aligned ones, are right on a Hopper GPU,
too."""

import pytest
import torch

from eval.bench_kernel.compare_providers import Setting, compare
from eval.bench_kernel.floor import Rates
from eval.bench_kernel.providers import make_providers
from eval.bench_kernel.providers.other_cuts import CUTS
from eval.bench_kernel.trees import Tree
from sgl_prefix_attn.execute.backends.choice import why_no_hopper
from sgl_prefix_attn.records import HeadConfig
from tests.support.gpu_problems import DEVICE

HEADS = [HeadConfig(32, 8, 128), HeadConfig(28, 4, 128)]


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("tree", ["1,10_4096,416", "1,4,37_300,63,130", "5_1000"])
def test_every_cut_is_right(tree, heads):
    device = torch.device(DEVICE)
    if why_no_hopper(device, heads, torch.bfloat16) is not None:
        pytest.skip("the row-tile kernel is for sm_90")
    setting = Setting(Tree.parse(tree), heads, 1, device, 0)
    providers = make_providers([f"prefix:{name}" for name in (*CUTS, "invariant")])
    rows = list(compare(setting, providers, Rates(3e12, 6e14, "test")))
    # Few trees have as many cuts as there are providers of the N-th best.
    few = {f"prefix:{name}" for name in CUTS if name.startswith("cut")}
    for row in rows:
        missing = row["provider"] in few - {"prefix:cut1"} and "cuts in all" in row["status"]
        assert row["status"] == "ok" or missing, row
