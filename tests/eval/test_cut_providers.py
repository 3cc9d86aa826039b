"""Plans by cuts that the planner would not choose, on the CPU: torch stands for the kernel."""

import pytest

from eval.bench_kernel import case, turns
from eval.bench_kernel.compare_providers import compare
from eval.bench_kernel.providers import make_providers
from eval.bench_kernel.providers.other_cuts import CUTS, fixed_tile, mean_split, nth_best
from eval.bench_kernel.providers.provider import Unsupported
from eval.bench_kernel.trees import Tree
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.records import HeadConfig
from tests.eval.kernel_settings import H100, setting_of


@pytest.mark.slow
def test_every_cut_is_judged_and_timed(monkeypatch):
    monkeypatch.setattr(case, "_POOL_BYTES", 0)  # two layers: the interpreter is slow
    monkeypatch.setattr(turns, "_PLANS", 1)
    chosen = ("cut1", "cut2", "cut9", "tile_128", "tile_64", "no_split", "mean_split")
    names = [f"prefix:{name}" for name in chosen]
    assert {name for name in CUTS if not name.startswith("cut")} <= set(chosen)
    rows = list(compare(setting_of("1,2,6_90,70,50"), make_providers(names), H100))
    status = {row["provider"]: row["status"] for row in rows}
    assert status.keys() == set(names)
    assert all(s == "ok" or s.endswith("cuts in all") for s in status.values())
    facts = {row["provider"]: row for row in rows if row["status"] == "ok"}
    assert facts["prefix:no_split"]["num_partials"] == 0
    assert facts["prefix:cut1"]["kv_tokens_read"] >= 90 + 2 * 70 + 6 * 50
    assert facts["prefix:cut1"]["predicted_us"] <= facts["prefix:cut2"]["predicted_us"]
    assert facts["prefix:mean_split"]["predicted_us"] is None


@pytest.mark.parametrize("name", ["1,2,6_20,70,5", "3_40"])
def test_cuts_are_in_the_order_of_their_predicted_times(name):
    planner = Planner(HeadConfig(8, 2, 16), num_sms=8)
    forest = build_forest(Tree.parse(name).paths())
    count = len(list(planner.cuts(forest)))
    times = [nth_best(number, planner, forest).us for number in range(1, count + 1)]
    assert times == sorted(times) and times[0] == min(cut.us for cut in planner.cuts(forest))
    with pytest.raises(Unsupported, match=f"{count} cuts in all"):
        nth_best(count + 1, planner, forest)


def test_tiles_of_a_fixed_size_and_of_the_mean():
    heads = HeadConfig(8, 2, 16)
    planner = Planner(heads, num_sms=16)
    forest = build_forest(Tree.parse("1,2,40_90,70,50").paths())
    # 40 requests of 4 heads: two tiles of 128 rows, three of 64
    assert fixed_tile(128, planner, forest).parts.size == 2
    assert fixed_tile(64, planner, forest).most_queries <= 16
    blocks = mean_split(planner, forest).tiles.blocks[:, :2].sum(1)
    parts = mean_split(planner, forest).parts
    assert ((blocks / parts) <= blocks.mean()).all()


def test_a_trees_paths_lead_to_its_slots():
    paths = Tree.parse("2,4,8_3,5,7").paths()
    assert paths.parent.tolist() == [-1, -1, 0, 0, 1, 1]
    assert paths.leaf.tolist() == [2, 2, 3, 3, 4, 4, 5, 5]
    assert paths.seq_lens.tolist() == [15] * 8
