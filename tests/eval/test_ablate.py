"""eval.ablate on the CPU: the torch interpreter of the words stands for the kernels."""

import math
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from eval.ablate import __main__ as command
from eval.ablate import ablations, figure, separate_merge, strategies
from eval.ablate.ablations import ABLATIONS, Step
from eval.bench_kernel.case import build_case
from eval.bench_kernel.oracle import SomeRows
from eval.bench_kernel.trees import Tree
from sgl_prefix_attn.execute import reference
from sgl_prefix_attn.execute import row_tile_reference as oracle
from sgl_prefix_attn.execute.backends import gluon_backend
from sgl_prefix_attn.kernels.gluon import words as W
from sgl_prefix_attn.plan.costs import CostModel
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.row_tile_planner import RowTilePlanner
from sgl_prefix_attn.records import HeadConfig
from tests.support.forests import random_paths
from tests.support.problems import make_problem
from tests.support.row_tile_blocks import poisoned_blocks
from tests.support.torch_row_tiles import TorchRowTiles

HEADS = HeadConfig(8, 2, 16)
CPU = torch.device("cpu")
TREE = Tree.parse("1,2,6_90,70,50")
ON_GPU = {"packs", "packs_serial"}  # Triton's kernels


def attend_parts(words, q, k, v, blocks, merges, sm_scale):
    """Items of a plan whose partial results are merged by `merges`; fp64 [B, Hq, D]."""
    out = torch.full(q.shape, math.nan, dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    partial = {}
    for item, queries, b_out, b_lse in oracle.run_items(words, q, k, v, blocks, sm_scale):
        rows = b_out.unflatten(1, (-1, group)).transpose(0, 1).flatten(1, 2)  # [n, Hq, D]
        if item[W.I_PARTS] == 1:
            assert out[queries].isnan().all(), "an output row is written twice"
            out[queries] = rows
        else:
            tile = item[W.I_PARTIAL] + item[W.I_PART]
            assert tile not in partial, "two items share a partial tile"
            partial[tile] = rows, b_lse.unflatten(1, (-1, group)).transpose(0, 1).flatten(1)
    for request in range(merges.offset.size - 1):
        mine = slice(merges.offset[request], merges.offset[request + 1])
        parts = list(zip(merges.tile[mine].tolist(), merges.query[mine].tolist(), strict=True))
        if not parts:
            continue
        assert out[request].isnan().all(), "a merged row is written by a tile as well"
        lse = torch.stack([partial[tile][1][i] for tile, i in parts]) * math.log(2)
        weight = torch.softmax(lse, 0)[..., None]
        out[request] = (weight * torch.stack([partial[tile][0][i] for tile, i in parts])).sum(0)
    return out


class TorchSeparateMerge(TorchRowTiles):
    def __init__(self, heads, dtype, device, merges, dynamic=False):
        super().__init__(heads, dtype, device)
        self.merges = merges

    def forward(self, workspace, layer):
        blocks = oracle.Blocks(workspace.kv_indices, workspace.keys)
        layer.out[:] = attend_parts(
            workspace.words, layer.q, layer.k_cache, layer.v_cache, blocks, self.merges,
            layer.sm_scale,
        )  # fmt: skip


@pytest.fixture
def interpreted(monkeypatch):
    def fused(heads, dtype, device, **flags):
        assert set(flags) <= {"pdl"}
        return TorchRowTiles(heads, dtype, device)

    monkeypatch.setattr(gluon_backend, "GluonBackend", fused)
    monkeypatch.setattr(separate_merge, "SeparateMerge", TorchSeparateMerge)


@pytest.fixture(scope="module")
def case():
    made = build_case(TREE, HEADS, 1, torch.bfloat16, CPU, 0)
    return replace(made, k=made.k[:2], v=made.v[:2])  # two layers: the interpreter is slow


def test_every_ablation_of_row_tiles_is_judged_and_timed(interpreted, case, capsys):
    names = [name for name in ABLATIONS if name not in ON_GPU]
    rows = command.ablate(case, 16, names, floor=1.0)
    assert [row["ablation"] for row in rows] == names
    assert all(row["problem"] is None and row["us"] > 0 for row in rows)
    read = {row["ablation"]: row["kv_tokens"] for row in rows}
    assert read["query"] == 6 * 210 and read["naive"] == 90 + 2 * 70 + 6 * 50
    partial = {row["ablation"]: row["partial_bytes"] for row in rows}
    assert partial["naive"] >= 3 * 6 * HEADS.num_qo_heads * (2 * 16 + 8)
    assert partial["no_split"] == 0
    text = "\n".join(command._means(rows))
    assert "naive" in text and "(1 trees)" in text
    assert capsys.readouterr().out.count(TREE.name) == len(names)


def test_a_wrong_output_is_a_problem(case, monkeypatch):
    def forgets(step):
        plan = step.planner.serialize(step.forest, step.best())
        return ablations._prepare(step, Forgets(), plan, None)

    monkeypatch.setitem(ABLATIONS, "forgets", forgets)
    (row,) = command.ablate(case, 16, ["forgets"], floor=1.0)
    assert "nan" in row["problem"] and "WRONG" in command._line(row)


class Forgets(TorchRowTiles):
    def __init__(self):
        super().__init__(HEADS, torch.bfloat16, CPU)

    def forward(self, workspace, layer):
        super().forward(workspace, layer)
        layer.out[3] = math.nan


# --- strategies ---------------------------------------------------------------------------------
@pytest.mark.parametrize("heads", [HEADS, HeadConfig(7, 1, 8), HeadConfig(2, 2, 8)], ids=str)
@pytest.mark.parametrize("strategy", ["query", "naive", "compute", "pat", "calibrated"])
@pytest.mark.parametrize("batch", [1, 37, 90])
def test_a_strategys_plan_is_full_attention(strategy, batch, heads):
    paths = random_paths(batch, batch, 12)
    forest = build_forest(paths)
    planner = RowTilePlanner(heads, num_sms=64, headroom=0)
    costs = CostModel.for_gpu("NVIDIA H100 80GB HBM3", heads)
    cut = strategies.strategy_cut(planner, forest, strategy, costs)
    plan, merges = strategies.serialize_parts(forest, cut, heads.group_size)
    problem = make_problem(paths, heads, torch.float64)
    words = torch.from_numpy(plan.words)
    blocks = poisoned_blocks(plan.num_blocks, problem.poison_slot)
    oracle.fill(words, problem.req_to_token, problem.pool, blocks)
    args = (words, problem.q, problem.k, problem.v, blocks)
    out = attend_parts(*args, merges, problem.sm_scale)
    want, _ = reference.full_attention(
        problem.q, problem.k, problem.v, problem.req_to_token, problem.pool, problem.seq_lens,
        sm_scale=problem.sm_scale,
    )  # fmt: skip
    torch.testing.assert_close(out, want, rtol=1e-9, atol=1e-9)
    assert plan.stats.num_partials == merges.tile.size == merges.offset[-1]
    if merges.tile.size:
        # a part that is left out is noticed
        fewer = replace(merges, offset=np.minimum(merges.offset, merges.tile.size - 1))
        wrong = attend_parts(*args, fewer, problem.sm_scale)
        assert not torch.allclose(wrong, want, equal_nan=True)


def test_naive_reads_each_node_once_and_query_nothing_twice():
    paths = random_paths(3, 40, 12)
    forest = build_forest(paths)
    planner = RowTilePlanner(HEADS, num_sms=64, headroom=0)
    costs = CostModel.for_gpu("NVIDIA H100 80GB HBM3", HEADS)
    query, naive = (
        strategies.strategy_cut(planner, forest, name, costs) for name in ("query", "naive")
    )
    assert query.most_queries == 1
    assert query.stats(forest).kv_tokens_read == paths.seq_lens.sum()
    assert naive.stats(forest).kv_tokens_read == forest.unique_tokens


def test_fixed_tiles_and_splits(interpreted, case):
    step = Step.of(case, 16)
    # 6 requests of 4 heads: one tile of 128 or of 64 rows, split or not
    assert step.best_whole().parts.max() == 1
    assert ABLATIONS["tile_64"](step).stats.num_packs == 1
    mean = ABLATIONS["mean_split"](step)
    assert mean.predicted_us is None and mean.stats.num_items >= step.best_whole().parts.size


# --- judgement, figure, command -----------------------------------------------------------------
def test_some_rows_judge_all_of_them(case):
    rows = SomeRows(case, most=3)
    good = SomeRows(case)._judge._truth.to(torch.bfloat16)
    assert rows.judge(good)[1] is None
    bad = good.clone()
    bad[-1] += 0.1
    assert "error" in rows.judge(bad)[1]
    unwritten = good.clone()
    unwritten[1] = math.nan
    assert "not written" in rows.judge(unwritten)[1]


def test_means_and_bars(tmp_path):
    rows = [
        {"heads": heads, "tree": tree, "ablation": name, "us": us, "floor_us": 2.0}
        for heads in ("32/8", "8/1")
        for tree, name, us in (("a", "x", 4.0), ("b", "x", 16.0), ("a", "y", 8.0), ("b", "y", 8.0))
    ]
    assert figure.mean_over_floor(rows, "x") == pytest.approx(4.0)
    assert len(command._means(rows)) == 4 and "1.000 of x's" in command._means(rows)[1]
    figure.write(rows, str(tmp_path / "bars.png"))
    assert (tmp_path / "bars.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("argv", "says"),
    [(["--ablations", "pat,fast"], "no fast; known are calibrated"), (["--heads", "32"], "32")],
)
def test_bad_arguments(argv, says, capsys):
    with pytest.raises(SystemExit):
        command.main(argv)
    assert says in capsys.readouterr().err


def test_the_merge_kernel_in_tritons_interpreter():
    """In a process of its own, because TRITON_INTERPRET=1 must be set before kernels are made."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/support/interpreted_merge.py"],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
