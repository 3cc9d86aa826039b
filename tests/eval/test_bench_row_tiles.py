"""eval.bench_row_tiles on the CPU: the torch interpreter stands for the kernels."""

import pytest
import torch

from eval import bench_row_tiles
from eval.bench_kernel.case import build_case
from eval.bench_kernel.trees import Tree
from sgl_prefix_attn.execute.backends.torch_row_tiles import TorchRowTiles
from sgl_prefix_attn.plan.row_tile_planner import RowTilePlanner
from sgl_prefix_attn.records import HeadConfig

HEADS = HeadConfig(8, 2, 16)


@pytest.fixture
def interpreted(monkeypatch):
    """The oracle instead of kernels, with and without dependent launches."""
    monkeypatch.setattr(bench_row_tiles, "GluonBackend", lambda *args: TorchRowTiles(*args[:3]))


@pytest.mark.parametrize("name", ["1,2,6_20,70,5", "3_40"])
def test_every_cut_is_judged_and_timed(interpreted, name):
    tree = Tree.parse(name)
    case = build_case(tree, HEADS, 1, torch.bfloat16, torch.device("cpu"), 0)
    planner = RowTilePlanner(HEADS, num_sms=8)
    row = bench_row_tiles._bench(case, planner, 3)
    assert len(row["cuts"]) == 3
    assert all(cut["problem"] is None and cut["us"] > 0 for cut in row["cuts"])
    row |= {"heads": "8/2", "tree": name, "floor_us": 1.0}
    assert name in bench_row_tiles._line(row)


def test_a_trees_paths_lead_to_its_slots():
    tree = Tree.parse("2,4,8_3,5,7")
    paths = tree.paths()
    assert paths.parent.tolist() == [-1, -1, 0, 0, 1, 1]
    assert paths.leaf.tolist() == [2, 2, 3, 3, 4, 4, 5, 5]
    assert paths.seq_lens.tolist() == [15] * 8
