"""eval.bench_kernel without a GPU: trees, floor, judgement, and what is never timed."""

import math

import numpy as np
import orjson
import pytest
import torch

from eval.bench_kernel import __main__ as cli
from eval.bench_kernel import over_floor
from eval.bench_kernel.case import build_case
from eval.bench_kernel.compare_providers import compare
from eval.bench_kernel.floor import Rates, floor_us, kv_bytes
from eval.bench_kernel.oracle import Oracle
from eval.bench_kernel.providers import make_providers
from eval.bench_kernel.providers.fasttree import _tree_info
from eval.bench_kernel.providers.flashinfer import _level_tables
from eval.bench_kernel.trees import PAT20, Tree, page_problem, parse_trees
from sgl_prefix_attn.records import HeadConfig
from tests.eval.kernel_settings import CPU, H100, HEADS, setting_of
from tests.eval.plain_torch import PlainTorch

# Floor column of the published measurement of the same 20 trees (32/8 heads, head dim 128, bf16).
FLOOR_US = (11, 12, 58, 24, 13, 185, 201, 185, 15, 28, 381, 59, 65, 58, 63, 15, 71, 39, 358, 1432)


def case_of(tree: str, page_size: int = 1, dtype=torch.bfloat16, heads=HEADS):
    return build_case(Tree.parse(tree), heads, page_size, dtype, CPU, seed=3)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1,4", "COUNTS_LENGTHS"), ("1_2_3", "COUNTS_LENGTHS"), ("1,x_8,8", "integers"),
        ("1,4_8", "2 counts but 1 lengths"), ("1,0_8,8", "at least 1"), ("4,2_8,8", "fewer nodes"),
    ],
)  # fmt: skip
def test_a_tree_that_does_not_parse_is_quoted(text, says):
    with pytest.raises(ValueError, match=says) as error:
        Tree.parse(text)
    assert text in str(error.value)


def test_tree_lists():
    assert [tree.name for tree in parse_trees("pat20")] == list(PAT20)
    assert [tree.name for tree in parse_trees("1,2_3,4;5_6")] == ["1,2_3,4", "5_6"]
    assert [tree.name for tree in parse_trees(";".join(PAT20))] == list(PAT20)
    for spec in (";", "nothere.txt"):
        with pytest.raises(ValueError):
            parse_trees(spec)


def test_nodes_of_requests_nest_and_all_are_used():
    tree = Tree.parse("2,3,7_4,4,4")
    nodes = tree.node_of_request()
    for level in (1, 2):
        parents = [tree.parent(level, int(node)) for node in nodes[level]]
        assert parents == nodes[level - 1].tolist()
        assert set(nodes[level]) == set(range(tree.counts[level]))


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_cases_permute_whole_pages_and_share_them(page_size):
    case = case_of("1,2,4_64,128,70", page_size)
    tree, rows = case.tree, case.req_to_token.numpy()
    assert rows.shape == (4, tree.seq_len) and (rows[:, :64] == rows[0, :64]).all()
    assert (rows[0, 64:192] == rows[1, 64:192]).all() and (rows[1, 64:192] != rows[2, 64:192]).all()
    # Each slot has one owner, page 0 none, and a page holds consecutive tokens.
    used = np.concatenate([case.node_slots(level).numpy().ravel() for level in range(3)])
    assert len(np.unique(used)) == len(used) == tree.unique_tokens and used.min() >= page_size
    assert set(used) == set(rows.ravel())
    assert (rows % page_size == np.arange(tree.seq_len) % page_size).all()
    assert not (np.diff(rows[0][::page_size]) == page_size).all()


def test_a_tree_must_fit_the_page_size():
    assert "32" in page_problem(Tree.parse("1,4_32,16"), 64)
    assert page_problem(Tree.parse("1,4_64,7"), 64) is None
    with pytest.raises(ValueError, match="page size 64"):
        case_of("1,4_32,16", 64)


def test_floor_is_the_published_one():
    heads = HeadConfig(32, 8, 128)
    floors = [floor_us(Tree.parse(name), heads, H100) for name in PAT20]
    assert [round(us) for us in floors] == list(FLOOR_US)


def test_floor_by_hand():
    tree, heads = Tree.parse("1,2_100,50"), HeadConfig(8, 2, 64)
    assert kv_bytes(tree.unique_tokens, heads) == 200 * 2 * 64 * 2 * 2
    slow_bytes = Rates(1e6, 1e15, "test")
    assert floor_us(tree, heads, slow_bytes) == pytest.approx(102400 / 1e6 * 1e6)
    slow_flops = Rates(1e15, 1e6, "test")
    assert floor_us(tree, heads, slow_flops) == pytest.approx(2 * 150 * 8 * 64 * 4)


def test_oracle_is_attention_by_definition():
    case = case_of("1,2_5,3", dtype=torch.float32)
    outs = [torch.empty_like(case.q) for _ in range(case.num_layers)]
    for layer, out in enumerate(outs):
        for i in range(2):
            for head in range(4):
                slots = case.req_to_token[i].long()
                k, v = case.k[layer][slots, head // 2], case.v[layer][slots, head // 2]
                weights = torch.softmax(k @ case.q[i, head] / math.sqrt(32), 0)
                out[i, head] = weights @ v
    assert len(outs) > 1 and Oracle(case).judge(outs, "by hand") < 1e-6
    assert torch.isnan(case.k[0][0]).all(), "slots that no request owns are poisoned"


@pytest.mark.slow
def test_every_provider_has_a_line():
    names = ["prefix", "prefix:pat", "flashinfer", "fasttree", "pat"]
    providers = [PlainTorch(), *make_providers(names)]
    rows = {row["provider"]: row for row in compare(setting_of("1,4_32,16"), providers, H100)}
    assert list(rows) == ["torch", *names]
    assert (
        rows["torch"]["status"] == rows["prefix"]["status"] == rows["prefix:pat"]["status"] == "ok"
    )
    assert rows["pat"]["status"] == "unavailable: needs --pat-path"
    assert rows["pat"]["run_page_size"] == 32
    assert rows["prefix"]["us"] > 0 and rows["prefix"]["error"] <= 2 * rows["prefix"]["error_torch"]


def test_a_tree_that_a_page_size_cannot_hold_is_unsupported():
    (row,) = compare(setting_of("1,4_32,16", page_size=64), [PlainTorch()], H100)
    assert row["status"].startswith("unsupported: ") and "page size 64" in row["status"]


@pytest.mark.parametrize("page_size", [1, 16])
def test_cascade_tables_cover_every_row(page_size):
    case = case_of("1,2,5_32,16,24", page_size=page_size)
    for level, length in enumerate(case.tree.lengths):
        qo_indptr, kv_indptr, kv_indices, last_len = _level_tables(case, level)
        start = sum(case.tree.lengths[:level])
        for i in range(case.tree.batch_size):
            node = int(torch.searchsorted(qo_indptr, i, right=True)) - 1
            pages = kv_indices[kv_indptr[node] : kv_indptr[node + 1]]
            tokens = (len(pages) - 1) * page_size + int(last_len[node])
            assert tokens == length
            expected = case.req_to_token[i, start : start + length][::page_size] // page_size
            assert pages.tolist() == expected.tolist()


def test_fasttree_nodes_follow_the_tree():
    nodes, offsets = _tree_info(case_of("1,2,4_8,16,5"))
    assert [node.parent for node in nodes] == [-1, 0, 0, 1, 1, 2, 2]
    assert [node.num_children for node in nodes] == [2, 2, 2, 0, 0, 0, 0]
    assert nodes[2].requests == [2, 3] and offsets == [0, 8, 24, 40, 45, 50, 55, 60]


def test_summary_means_and_ratios():
    def row(tree, provider, us, floor, status="ok"):
        return {"tree": tree, "heads": "4/2", "head_dim": 32, "page_size": 1, "dtype": "bf16",
                "provider": provider, "us": us, "floor_us": floor, "status": status}  # fmt: skip

    rows = [
        row("1,4_8,8", "prefix", 30.0, 10.0),
        row("1,4_8,8", "flashinfer", 30.0, 10.0),
        row("1,4_8,8", "fasttree", 60.0, 10.0),
        row("1,2_8,8", "prefix", 20.0, 10.0),
        row("1,2_8,8", "flashinfer", 40.0, 10.0),
        row("1,2_8,8", "fasttree", None, 10.0, "wrong: error"),
        row("2_8", "prefix", 9.0, 8.0),
        row("2_8", "flashinfer", 8.0, 8.0),
    ]
    (trees,) = over_floor.group(rows).values()
    means = {entry["provider"]: entry for entry in over_floor.means(trees)}
    assert means["prefix"]["all"] == pytest.approx((3 * 2 * 9 / 8) ** (1 / 3))
    assert means["prefix"]["sharing"] == pytest.approx(math.sqrt(6))
    assert means["prefix"]["num_sharing"] == 2
    assert means["best stock"]["all"] == pytest.approx(12 ** (1 / 3))
    assert means["fasttree"]["all"] == pytest.approx(6) and means["fasttree"]["num_all"] == 1
    assert over_floor.ratio_to_peer(trees["1,2_8,8"], "prefix") == pytest.approx(2)
    del trees["1,4_8,8"]
    means = {entry["provider"]: entry for entry in over_floor.means(trees)}
    assert "fasttree" not in means, "it ran nowhere"


def test_the_log_tells_the_spread_of_the_rounds():
    row = {"provider": "prefix", "status": "ok", "us": 20.0, "us_rounds": [19.0, 20.0, 22.0],
           "floor_us": 10.0, "plan_us": 1.0, "error": 0.0, "error_torch": 0.0,
           "run_page_size": None, "timing": "graph"}  # fmt: skip
    assert over_floor.spread(row) == pytest.approx(0.15)
    assert "20.0 us (spread 15.0 %)" in over_floor.text_row({"prefix": row}, row)


def test_command_writes_rows_and_meta(tmp_path, capsys):
    out = tmp_path / "result.json"
    argv = ["--trees", "1,3_16,8", "--heads", "4/2", "--head-dim", "32", "--device", "cpu"]
    argv += ["--providers", "prefix,prefix:pat,fa3", "--json", str(out)]
    assert cli.main(argv) == 0
    result = orjson.loads(out.read_bytes())
    meta = result["meta"]
    assert meta["command"].startswith("python -m eval.bench_kernel --trees 1,3_16,8")
    assert {"machine", "gpu", "driver", "versions", "commit", "dirty", "date", "seed"} <= set(meta)
    assert meta["peers"] == {}
    rounds = [row["us_rounds"] for row in result["rows"] if row["status"] == "ok"]
    assert [len(us) for us in rounds] == [3, 3]
    status = {row["provider"]: row["status"] for row in result["rows"]}
    assert status["prefix"] == status["prefix:pat"] == "ok"
    assert status["fa3"].startswith("unavailable: ")
    printed = capsys.readouterr().out
    assert "unavailable: needs an NVIDIA GPU" in printed and "| `1,3_16,8` | " in printed
