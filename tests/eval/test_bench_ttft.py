"""eval.bench_ttft with engines that answer at once."""

import pytest

from eval import bench_ttft, provenance, report
from eval.bench_ttft import Prompts
from tests.eval.fake_engines import fake_engines

ARGS = ["--device", "cpu", "--model-shape", "tiny", "--requests", "6", "--groups", "3,6",
        "--cached", "5,9", "--new", "2,4", "--batches", "3"]  # fmt: skip


def test_prompts_share_their_groups_prefix_and_nothing_else():
    prompts = Prompts(7, 3, (40, 50), (4, 16), 1000)
    assert len(prompts.prefixes) == 3 and all(40 <= len(p) <= 50 for p in prompts.prefixes)
    first, second = prompts.batch(), prompts.batch()
    for batch in (first, second):
        for i, prompt in enumerate(batch):
            prefix = prompts.prefixes[i // 3]
            assert prompt[: len(prefix)] == prefix and 4 <= len(prompt) - len(prefix) <= 16
    assert all(a != b for a, b in zip(first, second, strict=True))
    assert Prompts(7, 3, (40, 50), (4, 16), 1000).batch() == first, "in every run the same"


def test_engines_take_turns_and_ratios_are_to_the_first(tmp_path, monkeypatch, capsys):
    asked = []

    def ask(backend, op, ids=(), new_tokens=1):
        asked.append((backend, op, len(ids)))
        return {"seconds": {"torch_native": 0.5, "prefix/prefix": 0.25}[backend]}

    started = fake_engines(monkeypatch, ask)
    out = tmp_path / "out.json"
    backends = ["--backends", "torch_native,prefix/prefix", "--json", str(out)]
    assert bench_ttft.main([*ARGS, *backends]) == 0
    rows = provenance.load(out)["rows"]
    assert all(one.arguments["max_total_tokens"] > 2 * 9 + 5 * 6 * 4 for one in started)
    assert [(row["group"], row["backend"], row["ratio"]) for row in rows] == [
        (3, "torch_native", 1.0), (3, "prefix/prefix", 0.5),
        (6, "torch_native", 1.0), (6, "prefix/prefix", 0.5),
    ]  # fmt: skip
    assert all(len(row["seconds"]) == 3 for row in rows) and "0.500" in capsys.readouterr().out
    # the pool emptied and prefixes cached in both, then five batches in turn
    a_batch = [("torch_native", "time_batch", 6), ("prefix/prefix", "time_batch", 6)]
    assert asked[:8] == [
        ("torch_native", "flush", 0), ("torch_native", "time_batch", 2),
        ("prefix/prefix", "flush", 0), ("prefix/prefix", "time_batch", 2),
        *a_batch, *a_batch[::-1],
    ]  # fmt: skip
    assert report.main([str(out)]) == 0
    assert "| 6 | prefix/prefix | 250.00 | 0.500 |" in capsys.readouterr().out


@pytest.mark.parametrize("bad", [["--new", "4"], ["--cached", "9,5"], ["--groups", "0"]])
def test_bad_arguments_end_with_usage(bad, capsys):
    with pytest.raises(SystemExit):
        bench_ttft.main([*ARGS, *bad])
    assert f"argument {bad[0]}:" in capsys.readouterr().err
