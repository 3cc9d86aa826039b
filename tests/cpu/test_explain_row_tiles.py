"""explain where servers run row tiles: a plan read back from its words, and what a server wrote."""

from io import StringIO

import numpy as np
import orjson
import pytest
from rich.console import Console

from sgl_prefix_attn.cli import main
from sgl_prefix_attn.cli.explain_command import plan_view
from sgl_prefix_attn.explain import row_tile_text
from sgl_prefix_attn.explain.row_tile_view import RowTileView, row_tile_view
from sgl_prefix_attn.explain.schedule import in_rounds
from sgl_prefix_attn.explain.tree import Tree
from sgl_prefix_attn.explain.view import PlanView
from sgl_prefix_attn.kernels.gluon import words as W
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.row_tile_planner import RowTilePlanner
from sgl_prefix_attn.plan.row_tiles import B_MASKED, B_UNMASKED
from sgl_prefix_attn.records import Decision, HeadConfig, Prediction
from sgl_prefix_attn.step.decision_dump import content
from tests.support.forests import random_paths

DECISION = Decision("prefix", "predicted_faster", Prediction(30.0, 20.0))


def explained(spec, *options):
    return plan_view(main.build_parser().parse_args(["explain", str(spec), *options]))


def views(paths, heads):
    """Every cut of the planner, beside the plan that is read back from its words."""
    planner = RowTilePlanner(heads, num_sms=16, headroom=20)
    forest = build_forest(paths)
    for cut in planner.cuts(forest):
        yield cut, row_tile_view(planner.serialize(forest, cut), forest, DECISION, planner)


@pytest.mark.parametrize(
    "heads", [HeadConfig(8, 2, 128), HeadConfig(7, 1, 64), HeadConfig(2, 2, 128)], ids=str
)
@pytest.mark.parametrize(
    "paths",
    [Tree.parse("1,8,37_63,197,70").paths(), Tree.parse("1_1").paths()]
    + [random_paths(seed, 30, 12) for seed in range(6)],
)
def test_each_request_attends_to_each_of_its_positions_once(paths, heads):
    for _, view in views(paths, heads):
        seen = [np.zeros(length, int) for length in paths.seq_lens]
        for tile in view.tiles:
            for run in tile.runs:
                assert run.start < run.end and set(run.requests) <= set(tile.requests)
                for row in run.requests:
                    seen[row][run.start : run.end] += 1
        assert all((positions == 1).all() for positions in seen)
        rows = sorted(row for tile in view.tiles for row in tile.requests)
        assert rows == list(range(paths.seq_lens.size))
        assert sum(tile.tokens for tile in view.tiles) == view.plan.stats.kv_tokens_read
        assert len(view.items) == view.plan.stats.num_items


def test_blocks_and_unmasked_runs_are_the_planner_s():
    paths = Tree.parse("1,4,37_200,500,70").paths()
    for cut, view in views(paths, HeadConfig(8, 2, 128)):
        blocks = cut.tiles.blocks[:, [B_UNMASKED, B_MASKED]]
        assert sorted(blocks.tolist()) == sorted([t.unmasked, t.masked] for t in view.tiles)
        for tile in view.tiles:
            whole = [run for run in tile.runs if run.unmasked]
            assert all(run.requests == tile.requests for run in whole)
            assert sum(run.end - run.start for run in whole) == W.BLOCK * tile.unmasked


def test_a_part_takes_what_the_planner_predicts():
    heads = HeadConfig(8, 2, 128)
    rates = RowTilePlanner(heads, num_sms=16).rates
    for cut, view in views(Tree.parse("1,4,37_200,500,70").paths(), heads):
        edge, request = cut.tiles.edge, cut.leaves.request
        costs = {
            tuple(request[a:b].tolist()): cost
            for a, b, cost in zip(edge[:-1], edge[1:], cut.costs, strict=True)
        }
        for tile in view.tiles:
            wide = len(tile.requests) * heads.group_size > W.HALF_ROWS
            fixed = len(tile.parts) * rates.item / (1 if wide else 2)
            us = sum(part.us for part in tile.parts)
            assert us - fixed == pytest.approx(costs[tile.requests])


def test_every_ticket_runs_once_and_a_cta_does_one_at_a_time():
    costs = [5.0, 4.0, 3.0]
    runs = list(in_rounds(costs, heads=3, ctas=4))
    assert [(run.item, run.head) for run in runs] == [(i, h) for i in range(3) for h in range(3)]
    assert [run.cta for run in runs] == [0, 1, 2, 3, 3, 2, 1, 0, 0]
    free = np.zeros(4)
    for run in runs:
        assert run.start == free[run.cta] and run.end - run.start == costs[run.item]
        free[run.cta] = run.end


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ((), RowTileView),
        (("--gpu", "H200"), RowTileView),
        (("--gpu", "A100"), PlanView),
        (("--kernels", "triton"), PlanView),
        (("--strategy", "pat"), PlanView),
        (("--heads", "32/1"), PlanView),
    ],
)
def test_plans_are_those_of_the_gpu_s_servers(options, kind):
    view, is_row_tiles = explained("1,8_1000,100", *options)
    assert isinstance(view, kind) and is_row_tiles == (kind is RowTileView)


def test_the_text_names_tiles_ctas_and_the_decision():
    view, _ = explained("1,4,64_1024,768,200")
    console = Console(width=120, file=StringIO(), highlight=False)
    console.print(row_tile_text.render(view))
    printed = console.file.getvalue()
    for part in (
        "node 1: 768 tokens 1024:1792, requests 0-15", "0     0-15      16 x 4 heads  4992",
        "16 items x 8 KV heads = 128 tickets", "132 CTAs: 128 busy", "unique 16896",
        "a server that runs row tiles would run prefix kernels (predicted_faster)",
    ):  # fmt: skip
        assert part in printed, printed


@pytest.mark.parametrize("spec", ["1,8,80_32,512,40", "3_1"])
def test_a_picture_is_drawn(spec, tmp_path):
    pytest.importorskip("matplotlib")
    png = tmp_path / "plan.png"
    assert main.main(["explain", spec, "--png", str(png)]) == 0
    assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 10_000


def test_words_of_another_layout_are_refused():
    [(_, view), *_] = views(Tree.parse("1,2_64,9").paths(), HeadConfig(8, 2, 128))
    view.plan.words[W.H_VERSION] += 1
    planner = RowTilePlanner(HeadConfig(8, 2, 128), num_sms=16)
    with pytest.raises(ValueError, match="layout"):
        row_tile_view(view.plan, view.forest, DECISION, planner)


def test_what_a_server_wrote_is_explained_with_its_decision(tmp_path, capsys):
    file = tmp_path / "dump.json"
    file.write_bytes(orjson.dumps(content(Tree.parse("1,8_1000,100").paths(), DECISION)))
    assert main.main(["explain", str(file)]) == 0
    said = capsys.readouterr().out
    assert "8 requests, 1 shared nodes" in said
    assert (
        "served: prefix kernels (predicted_faster), predicted 20.0 us, FlashInfer 30.0 us" in said
    )
    content_without = orjson.loads(file.read_bytes()) | {"decision": {"variant": "stock"}}
    file.write_bytes(orjson.dumps(content_without))
    assert main.main(["explain", str(file)]) == 2
    assert "its decision has no 'reason'" in capsys.readouterr().err
