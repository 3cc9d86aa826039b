"""The explain command: a plan read back from its words, as text and as the picture of the docs."""

import re
import subprocess
import sys
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from sgl_prefix_attn.cli import main, plan_spec
from sgl_prefix_attn.cli.explain_command import plan_view
from sgl_prefix_attn.cli.plan_spec import read_spec
from sgl_prefix_attn.explain import schedule as sched
from sgl_prefix_attn.explain import text
from sgl_prefix_attn.explain.view import view
from sgl_prefix_attn.kernels import layout as L
from sgl_prefix_attn.plan.forest import build_forest

EXAMPLE = Path(__file__).resolve().parents[2] / "docs/images/six-requests.json"


def explained(spec, *options):
    """A plan of packs."""
    parser = main.build_parser()
    arguments = ["explain", str(spec), "--kernels", "triton", *options]
    return plan_view(parser.parse_args(arguments))[0]


@pytest.fixture(scope="module")
def six():
    return explained(EXAMPLE)


def test_the_example_shows_each_stage_of_the_planner(six):
    lengths = [node.end - node.start for node in six.nodes]
    assert lengths == [1024, 48, 768, 512]  # 256 + 256 joined, request 0's own 120 left out
    assert [node.parent for node in six.nodes] == [-1, 0, 1, 1]
    assert [node.requests for node in six.nodes] == [(0, 1, 2, 3, 4), (0, 1, 2, 3), (0, 1), (2, 3)]
    shared = [pack for pack in six.packs if not pack.grows]
    assert [(pack.nodes, pack.requests) for pack in shared] == [
        ((0,), (0, 1, 2, 3, 4)),
        ((1, 2), (0, 1)),
        ((1, 3), (2, 3)),
    ]
    assert [pack.merged for pack in shared] == [False, True, True]


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        (EXAMPLE, ()),
        ("1,8,512_32,512,40", ()),
        ("4,64_3000,700", ("--gpu", "A100", "--heads", "64/8", "--strategy", "naive")),
        ("5_300", ("--strategy", "query")),
    ],
)
def test_items_cover_the_kv_of_every_pack_exactly_once(spec, options):
    """One row tile's worth: a pack of many queries is read once per row tile."""
    one = explained(spec, *options)
    read = {}
    for queue in one.queues:
        for item in queue:
            for pack, (start, end) in zip(item.packs, item.ranges, strict=True):
                read.setdefault(pack, []).append((start, end))
    assert set(read) == set(range(len(one.packs)))
    for i, pack in enumerate(one.packs):
        ranges = sorted(set(read[i]))
        assert ranges[0][0] == pack.start and ranges[-1][1] == pack.end
        assert all(a[1] == b[0] for a, b in zip(ranges, ranges[1:], strict=False))
    assert sum(map(len, one.queues)) == one.plan.stats.num_items
    assert sum(pack.tokens for pack in one.packs) == one.plan.stats.kv_tokens_read


def test_every_ticket_runs_once_and_a_cta_does_one_at_a_time():
    one = explained("1,16,1024_256,128,700")
    for tile, queue in enumerate(one.queues):
        runs = list(sched.schedule(one, tile))
        tickets = {(run.item, run.head) for run in runs}
        assert len(runs) == len(tickets) == len(queue) * one.heads.num_kv_heads
        free = np.zeros(sched.num_ctas(one, tile))
        for run in runs:
            assert run.start == free[run.cta] == free.min()
            free[run.cta] = run.end


def test_the_text_names_nodes_packs_and_queues(six):
    console = Console(width=120, record=True, file=StringIO())
    console.print(text.render(six))
    printed = console.export_text()
    assert "node 1: 48 tokens 1024:1072, requests 0-3" in printed
    assert "nodes 1+2" in printed and "shared 64x32" in printed
    assert "KV tokens read per layer: 5008; unique 4960" in printed


def test_request_list():
    assert text.request_list([5, 0, 2, 1]) == "0-2, 5"


@pytest.mark.parametrize("spec", [EXAMPLE, "1,8,80_32,512,40", "3_1"])
def test_a_picture_is_drawn(spec, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    png = tmp_path / "plan.png"
    assert main.main(["explain", str(spec), "--png", str(png)]) == 0
    assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 10_000
    assert "written" in capsys.readouterr().out


def test_words_of_another_layout_are_refused(six):
    six.plan.words[L.H_VERSION] += 1
    try:
        with pytest.raises(ValueError, match="layout"):
            view(six.plan, six.decision, six.heads, six.tile_set)
    finally:
        six.plan.words[L.H_VERSION] -= 1


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
        (["1,2_4294967306,5"], "tree '1,2_4294967306,5': 4294967311 tokens a request, more than"),
        (["1,2_2200000000,5"], "tree '1,2_2200000000,5': 2200000005 tokens a request, more than"),
        (["2_1073741824"], "tree '2_1073741824': seq_lens add up to 2147483648 unique KV tokens"),
        (["1,9999999999999_1,1"], "seq_lens add up to 10000000000000 unique KV tokens"),
        (["2_9", "--strategy", "best"], "strategy"),
        (["2_9", "--head-dim", "300"], "head_dim:300: such a server runs stock attention"),
        (["2_9", "--heads", "129/1"], "group_size:129: such a server runs stock attention"),
        (["2_9", "--png", "/"], "directory"),
    ],
)
def test_what_cannot_be_explained_is_said(arguments, message, capsys):
    assert main.main(["explain", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_shared_tokens_take_slots_once():
    paths = read_spec("1,1024_4000000,100")
    assert paths.seq_lens.sum(dtype=np.int64) > 2**31 > build_forest(paths).unique_tokens


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "it is no JSON object"),
        ('{"paths": [[]]}', "seq_lens"),
        ('{"paths": [[[0, 9]]], "seq_lens": [9]}', "shorter"),
        ('{"paths": [[], []], "seq_lens": [2000000000, 2000000000]}', "seq_lens add up to 40"),
        ('{"paths": null, "seq_lens": [9]}', "paths must be a sequence"),
    ],
)
def test_a_bad_file_is_named(content, message, tmp_path, capsys):
    file = tmp_path / "odd.json"
    file.write_text(content)
    assert main.main(["explain", str(file)]) == 2
    error = capsys.readouterr().err
    assert "odd.json" in error and message in error


def test_a_decision_that_cannot_be_read_is_said_before_the_plan(tmp_path, capsys):
    file = tmp_path / "odd.json"
    file.write_text('{"paths": [[]], "seq_lens": [9], "decision": 3}')
    assert main.main(["explain", str(file)]) == 2
    said = capsys.readouterr()
    assert not said.out and "its decision is not as SGL_PREFIX_ATTN_DUMP writes it: 3" in said.err


@pytest.fixture
def piped(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)


def test_a_gain_that_is_too_small_is_said_to_be(piped, capsys):
    assert main.main(["explain", "1,16_10,10", "--head-dim", "96"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"predicted_slower: a predicted gain of 1\.\d+ is less than", said), said


def test_lines_are_folded_for_terminals_alone(piped, capsys):
    assert main.main(["explain", "1,2,6_1024,512,64"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) > 80


def test_an_interrupted_command_says_so(monkeypatch, capsys):
    monkeypatch.setattr(
        plan_spec, "read_spec", lambda spec: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    assert main.main(["explain", "1,2_3,4"]) == 130
    assert capsys.readouterr().err == "sgl-prefix-attn explain: interrupted\n"


def test_a_reader_that_has_had_enough_is_no_error():
    command = [sys.executable, "-m", "sgl_prefix_attn", "explain", "1,2_3,4"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1
