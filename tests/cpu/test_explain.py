"""The explain command: a plan read back from its words, as text and as a picture, and what a server
wrote."""

import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import orjson
import pytest
from rich.console import Console

from sgl_prefix_attn.execute.backends.portable_backend import PortableBackend
from sgl_prefix_attn.kernels import words as W
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.kernel_rates import PortableRates
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.plan.schedule import in_rounds
from sgl_prefix_attn.plan.tiles import B_MASKED, B_UNMASKED
from sgl_prefix_attn.plan.view import MOST_ROWS, view
from sgl_prefix_attn.ranges import in_short
from sgl_prefix_attn.records import Decision, HeadConfig, Prediction
from sgl_prefix_attn.step.decision_dump import content
from sgl_prefix_attn.tools import main, plan_spec
from sgl_prefix_attn.tools.explain import text
from sgl_prefix_attn.tools.explain.tree import Tree
from sgl_prefix_attn.tools.explain_command import plan_view
from sgl_prefix_attn.tools.plan_spec import read_spec
from tests.support.forests import random_paths

EXAMPLE = Path(__file__).resolve().parents[2] / "docs/images/six-requests.json"
DECISION = Decision("prefix", "predicted_faster", Prediction(30.0, 20.0))


def explained(spec, *options):
    args = main.build_parser().parse_args(["explain", str(spec), *options])
    return plan_view(read_spec(args.spec)[0], args)


def printed(shown) -> str:
    console = Console(width=160, file=StringIO(), highlight=False)
    console.print(text.render(shown))
    return console.file.getvalue()


def views(paths, heads):
    """Every cut of the planner, beside the plan that is read back from its words."""
    planner = Planner(heads, num_sms=16, headroom=20)
    forest = build_forest(paths)
    for cut in planner.cuts(forest):
        yield cut, view(planner.serialize(forest, cut), forest, DECISION, planner)


def test_the_example_shows_each_node():
    nodes = explained(EXAMPLE).nodes
    lengths = [node.end - node.start for node in nodes]
    assert lengths == [1024, 48, 768, 512]  # 256 + 256 joined, request 0's own 120 left out
    assert [node.parent for node in nodes] == [-1, 0, 1, 1]
    assert [node.requests for node in nodes] == [(0, 1, 2, 3, 4), (0, 1, 2, 3), (0, 1), (2, 3)]


@pytest.mark.parametrize(
    "heads", [HeadConfig(8, 2, 128), HeadConfig(7, 1, 64), HeadConfig(2, 2, 128)], ids=str
)
@pytest.mark.parametrize(
    "paths",
    [Tree.parse("1,8,37_63,197,70").paths(), Tree.parse("1_1").paths()]
    + [random_paths(seed, 30, 12) for seed in range(6)],
)
def test_each_request_attends_to_each_of_its_positions_once(paths, heads):
    for _, shown in views(paths, heads):
        seen = [np.zeros(length, int) for length in paths.seq_lens]
        for tile in shown.tiles:
            for run in tile.runs:
                assert run.start < run.end and set(run.requests) <= set(tile.requests)
                for row in run.requests:
                    seen[row][run.start : run.end] += 1
        assert all((positions == 1).all() for positions in seen)
        rows = sorted(row for tile in shown.tiles for row in tile.requests)
        assert rows == list(range(paths.seq_lens.size))
        assert sum(tile.tokens for tile in shown.tiles) == shown.plan.stats.kv_tokens_read
        assert len(shown.items) == shown.plan.stats.num_items


def test_blocks_and_unmasked_runs_are_the_planner_s():
    paths = Tree.parse("1,4,37_200,500,70").paths()
    for cut, shown in views(paths, HeadConfig(8, 2, 128)):
        blocks = cut.tiles.blocks[:, [B_UNMASKED, B_MASKED]]
        assert sorted(blocks.tolist()) == sorted([t.unmasked, t.masked] for t in shown.tiles)
        for tile in shown.tiles:
            whole = [run for run in tile.runs if run.unmasked]
            assert all(run.requests == tile.requests for run in whole)
            assert sum(run.end - run.start for run in whole) == W.BLOCK * tile.unmasked


def test_a_part_takes_what_the_planner_predicts():
    heads = HeadConfig(8, 2, 128)
    rates = Planner(heads, num_sms=16).rates
    for cut, shown in views(Tree.parse("1,4,37_200,500,70").paths(), heads):
        edge, request = cut.tiles.edge, cut.leaves.request
        costs = {
            tuple(request[a:b].tolist()): cost
            for a, b, cost in zip(edge[:-1], edge[1:], cut.costs, strict=True)
        }
        for tile in shown.tiles:
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
    ("options", "is_hopper"),
    [
        ((), True),
        (("--gpu", "H200"), True),
        (("--kernels", "portable"), False),
        (("--kernels", "portable", "--strategy", "pat"), False),
        (("--gpu", "A100"), False),
        (("--heads", "32/1"), False),
    ],
)
def test_plans_are_those_of_the_gpu_s_servers(options, is_hopper):
    shown = explained("1,8_1000,100", *options)
    portable = PortableBackend.config_for(shown.heads)
    assert shown.plan.tile_rows == (W.TILE_ROWS if is_hopper else portable.tile_rows)
    assert len(shown.decisions) == (0 if is_hopper else len(shown.nodes))


def test_the_text_names_tiles_ctas_and_the_decision():
    said = printed(explained("1,4,64_1024,768,200"))
    for part in (
        "node 1: 768 tokens 1024:1792, requests 0-15", "0     0-15      16 x 4 heads  4992",
        "16 items x 8 KV heads = 128 tickets", "132 CTAs: 128 busy", "unique 16896",
        "a server would run prefix kernels (predicted_faster)",
    ):  # fmt: skip
        assert part in said, said


def test_a_gain_that_is_too_small_is_said_to_be():
    slower = Decision("stock", "predicted_slower", Prediction(stock_us=30.0, prefix_us=29.0))
    said = printed(replace(explained("1,16_10,10"), decision=slower))
    assert "stock kernels (predicted_slower: a predicted gain of 1.03 is less than" in said, said


def test_request_list():
    assert in_short([5, 0, 2, 1]) == "0-2, 5"


@pytest.mark.slow
@pytest.mark.parametrize("spec", [EXAMPLE, "1,8,80_32,512,40", "3_1"])
def test_a_picture_is_drawn(spec, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    png = tmp_path / "plan.png"
    assert main.main(["explain", str(spec), "--png", str(png)]) == 0
    assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 10_000
    assert "written" in capsys.readouterr().out


# A long node of many requests is best read in few wide tiles, and the rest in narrow ones, which
# are ten times as fast; in one tile, both would be wide.
PLANTED = PortableRates(
    wide=5.0, wide_masked=5.0, narrow=0.5, narrow_masked=0.5, item=0.1, hbm=3e6, l2=5.5e6,
    fixed=5.0, split=1.5, part=0.07, partial=1e9, overlap=3.0,
)  # fmt: skip
COSTLY = replace(PLANTED, split=1e4)


@pytest.mark.parametrize(
    ("strategy", "rates", "splits"),
    [
        ("calibrated", PLANTED, [True] + [False] * 32),
        ("calibrated", COSTLY, [False] * 33),
        ("naive", COSTLY, [True] * 33),
        ("query", PLANTED, [False] * 33),
    ],
)
def test_each_node_says_whether_it_is_split_and_what_both_are_predicted_to_take(
    strategy, rates, splits
):
    forest = build_forest(Tree.parse("1,32,64_8192,48,640").paths())
    planner = Planner(
        HeadConfig(32, 8, 128), num_sms=264, rates=rates, tile_rows=64, strategy=strategy,
        splits_nodes=True,
    )  # fmt: skip
    plan = planner.plan_forest(forest)
    shown = view(plan, forest, DECISION, planner)
    assert [one.split for one in shown.decisions] == splits[:MOST_ROWS] and len(splits) > MOST_ROWS
    assert len({one.merged_us for one in shown.decisions}) == 1
    assert sum(len(tile.parts) for tile in shown.tiles) == plan.stats.num_items
    root, child = shown.decisions[:2]
    for one in (root, child):
        what = "split" if one.split else "merged"
        assert f": {what} ({one.merged_us:.1f} us merged, {one.split_us:.1f} us split)" in printed(
            shown
        )
    if strategy == "calibrated":
        assert (root.split_us < 0.95 * root.merged_us) == root.split
        fastest = root.split_us if root.split else root.merged_us
        assert plan.predicted_us == pytest.approx(fastest)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["1,2"], "neither a file nor a tree"),
        (["1,2_3"], "2 counts but 1 lengths"),
        (["2,1_3,4"], "fewer nodes"),
        (["1,0_3,4"], "at least 1"),
        (["missing.json"], "cannot read missing.json"),
        (["2_9", "--heads", "6/4"], "multiple"),
        (["2_9", "--heads", "8/0"], "num_kv_heads must be a positive integer, got 0"),
        (["1,2_4294967306,5"], "4,294,967,316 unique KV tokens, more than explain plans"),
        (["2_1073741824"], "2,147,483,648 unique KV tokens, more than explain plans (2,147,483,6"),
        (["1,9999999999999_1,1"], "9,999,999,999,999 requests, more than explain plans (1,000,000"),
        (["1,99999999_1,1"], "99,999,999 requests, more than explain plans"),
        (["1000001,1000001_1,1"], "1,000,001 requests"),
        (["600000,600000,600000_1,1,1"], "1,200,000 shared nodes, more than explain plans"),
        (["2_9", "--strategy", "pat"], "PREFIX_ATTN_KERNELS"),
        (["2_9", "--head-dim", "300"], "head_dim:300: such a server runs stock attention"),
        (["2_9", "--heads", "8/2", "--tp", "3"], "8/2 heads cannot be divided by --tp 3"),
        (["2_9", "--heads", "129/1"], "group_size:129: such a server runs stock attention"),
    ],
)
def test_what_cannot_be_explained_is_said(arguments, message, capsys):
    assert main.main(["explain", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_picture_that_cannot_be_written_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main.main(["explain", "2_9", "--png", "x" * 300])
    assert "argument --png: " in (said := capsys.readouterr().err) and "cannot be written" in said


def test_an_unknown_strategy_is_refused_for_any_kernels(capsys):
    with pytest.raises(SystemExit, match="2"):
        main.main(["explain", "2_9", "--strategy", "best"])
    assert "invalid choice: 'best'" in capsys.readouterr().err


def test_a_chain_of_64_levels_is_a_tree_and_no_file_name(capsys):
    spec = f"{'1,' * 63}8_{','.join(['1000'] * 64)}"
    assert len(spec) > 255, "more than a file name may have"
    assert main.main(["explain", spec]) == 0
    assert "8 requests" in capsys.readouterr().out


def test_shared_tokens_take_slots_once():
    paths, _ = read_spec("1,1024_4000000,100")
    assert paths.seq_lens.sum(dtype=np.int64) > 2**31 > build_forest(paths).unique_tokens


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "it is no JSON object"),
        ('{"paths": [[]]}', "seq_lens"),
        ('{"paths": [[[0, 9]]], "seq_lens": [9]}', "at most 8 of the 9 tokens"),
        (
            '{"paths": [[], []], "seq_lens": [2000000000, 2000000000]}',
            "4,000,000,000 unique KV",
        ),
        ('{"paths": null, "seq_lens": [9]}', "paths must be a sequence"),
    ],
)
def test_a_bad_file_is_named(content, message, tmp_path, capsys):
    file = tmp_path / "odd.json"
    file.write_text(content)
    assert main.main(["explain", str(file)]) == 2
    error = capsys.readouterr().err
    assert "odd.json" in error and message in error


def test_what_a_server_wrote_is_explained_with_its_decision(tmp_path, capsys):
    file = tmp_path / "dump.json"
    file.write_bytes(orjson.dumps(content(Tree.parse("1,8_1000,100").paths(), DECISION)))
    assert main.main(["explain", str(file)]) == 0
    said = capsys.readouterr().out
    assert "8 requests, 1 shared nodes" in said
    assert (
        "served: prefix kernels (predicted_faster), predicted 20.0 us, stock ones 30.0 us" in said
    )
    content_without = orjson.loads(file.read_bytes()) | {"decision": {"variant": "stock"}}
    file.write_bytes(orjson.dumps(content_without))
    assert main.main(["explain", str(file)]) == 2
    assert "its decision has no 'reason'" in capsys.readouterr().err


def test_a_decision_that_cannot_be_read_is_said_before_the_plan(tmp_path, capsys):
    file = tmp_path / "odd.json"
    file.write_text('{"paths": [[]], "seq_lens": [9], "decision": 3}')
    assert main.main(["explain", str(file)]) == 2
    said = capsys.readouterr()
    assert not said.out and "its decision is not as PREFIX_ATTN_DUMP writes it: 3" in said.err


def test_lines_are_folded_for_terminals_alone(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main.main(["explain", "1,2,6_1024,512,64"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) > 80


def test_a_terminal_of_no_columns_has_lines(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "0")
    assert main.main(["explain", "1,2,6_1024,512,64"]) == 0
    assert "node 0: 1024 tokens" in capsys.readouterr().out


def test_an_interrupted_command_says_so(monkeypatch, capsys):
    monkeypatch.setattr(
        plan_spec, "read_spec", lambda spec: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    assert main.main(["explain", "1,2_3,4"]) == 130
    assert capsys.readouterr().err.endswith("sgl-prefix-attn explain: interrupted\n")


@pytest.mark.slow
def test_a_reader_that_has_had_enough_is_no_error():
    command = [sys.executable, "-m", "sgl_prefix_attn", "explain", "1,2_3,4"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert b"Error" not in process.stderr.read()
    assert process.returncode == 1
