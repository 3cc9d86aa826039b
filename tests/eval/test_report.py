"""eval.report: the pages' tables are what the result files say."""

import copy
from pathlib import Path

import pytest

from eval import provenance, report

META = {
    "machine": "Linux x86_64, 2 CPUs",
    "gpu": "NVIDIA H100 80GB HBM3",
    "driver": "580.1",
    "versions": {"torch": "2.11.0", "flashinfer-python": None},
    "commit": "abc123",
    "dirty": False,
    "command": "python -m eval.bench_kernel --trees pat20",
    "date": "2026-11-21 10:00 UTC",
}


def kernel_row(provider, us, **changes):
    return {
        "tree": "1,2_8,8", "heads": "32/8", "head_dim": 128, "page_size": 1, "dtype": "bf16",
        "provider": provider, "status": "ok", "floor_us": 10.0, "us": us, "plan_us": 321.0,
        "us_rounds": None if us is None else [0.99 * us, us, 1.01 * us],
        "error": 1e-3, "error_torch": 1e-3, "timing": "graph", "run_page_size": None, **changes,
    }  # fmt: skip


KERNELS = [
    kernel_row("prefix", 20.0),
    kernel_row("flashinfer", 50.0),
    kernel_row("pat", 25.0, timing="eager", run_page_size=32),
    kernel_row("fa3", None, status="wrong: error 1e-01", plan_us=None),
]
PEERS = {
    "fasttree": {"commit": "f" * 40, "dirty": True, "sha256": "ab" * 32, "num_files": 3},
    "pat": {"commit": None, "dirty": None, "sha256": "cd" * 32, "num_files": 3},
}
ENGINES = [
    {
        "backend": backend, "workload": "shared8k", "page_size": 1, "batch": 64, "shared": 8192,
        "private": 256, "tpot_ms": tpot, "ratio": tpot / 15.0,
    }
    for backend, tpot in (("prefix", 9.0), ("flashinfer", 15.0))
]  # fmt: skip


@pytest.fixture
def files(tmp_path):
    kernels, engines = tmp_path / "kernels.json", tmp_path / "engine.json"
    provenance.save(kernels, META, KERNELS)
    provenance.save(engines, META | {"dirty": True}, ENGINES)
    readme = tmp_path / "README.md"
    readme.write_text(f"# Title\n\n{report.BEGIN}\nold\n{report.END}\n\nrest\n")
    return [str(kernels), str(engines)], readme


@pytest.fixture
def printed(tmp_path, capsys):
    """What the command prints about rows."""

    def call(rows, **meta):
        path = tmp_path / "result.json"
        provenance.save(path, META | meta, rows)
        assert report.main([str(path)]) == 0
        return capsys.readouterr().out

    return call


def test_tables_and_sources(files, capsys):
    results, _ = files
    assert report.main(results) == 0
    text = capsys.readouterr().out
    assert "| `1,2_8,8` | 10 | 20.0 (2.00) | 50.0 (5.00) | 25.0 (2.50) | 1.25 |" in text
    assert "- fa3: wrong: error 1e-01" in text
    assert "- pat: run at page size 32; timed without a CUDA graph" in text
    assert "Best stock peer of each tree: 5.00" in text and "321 us" in text
    assert "NVIDIA H100 80GB HBM3, driver 580.1; torch 2.11.0; commit abc123;" in text
    assert "commit abc123 with local changes" in text
    assert "`python -m eval.bench_kernel --trees pat20`" in text
    assert "| 64 | 8192 + 256 | 1 | 9.00 ms (0.600) | 15.00 ms (1.000) |" in text


def test_kernel_tables_tell_the_spread_and_the_trees_in_common(printed):
    rows = [*KERNELS, kernel_row("prefix", 30.0, tree="1,4_8,8"),
            kernel_row("flashinfer", 30.0, tree="1,4_8,8")]  # fmt: skip
    rows[0] = rows[0] | {"us_rounds": [18.0, 20.0, 21.0]}
    text = printed(rows)
    common = "2.00 (1 trees) | 5.00 (1 trees) | 2.50 (1 trees) |"
    assert f"| geometric mean of time / floor, trees that all ran |  | {common}" in text
    assert "median of 3 rounds in which all took turns" in text
    assert "2.0 % in the median, at most 15.0 %" in text
    assert "rounds" not in printed([row | {"us_rounds": None} for row in rows])


def test_peers_from_a_folder_are_named_with_their_sources(printed):
    fasttree = "fasttree ffffffffffff with local changes (sources sha256 abababababab)"
    pat = "pat (sources sha256 cdcdcdcdcdcd)"
    assert f"torch 2.11.0; {fasttree}; {pat}; commit abc123;" in printed(KERNELS, peers=PEERS)


def test_round_trip_and_check(files, capsys):
    results, readme = files
    check = [*results, "--readme", str(readme), "--check"]
    assert report.main(check) == 1
    assert report.main([*results, "--readme", str(readme)]) == 0
    assert readme.read_text().startswith("# Title\n\n<!-- bench:begin -->\n32/8 heads")
    assert readme.read_text().endswith("<!-- bench:end -->\n\nrest\n")
    assert report.main(check) == 0
    rows = copy.deepcopy(KERNELS)
    rows[0]["us"] = 21.0
    provenance.save(results[0], META, rows)
    assert report.main(check) == 1


def trace_row(backend, alternation, ttft, p99, sent=10):
    times = {"median": ttft, "p90": p99, "p99": p99}
    return {
        "backend": backend, "rate": 2.0, "alternation": alternation, "sent": sent, "completed": 9,
        "input_tokens": 1000, "cached_tokens": 100 + 50 * alternation,
        "achieved_rate": 1.5, "ttft_ms": times, "tpot_ms": dict(times), "late_ms": {"p99": 0.5},
        "each": {"ttft_ms": [ttft] * sent, "tpot_ms": [ttft] * sent},
    }  # fmt: skip


def test_the_table_of_a_trace(printed):
    rows = [
        trace_row("flashinfer", 0, 100.0, 300.0),
        trace_row("prefix", 0, 99.0, 350.0),
        trace_row("flashinfer", 1, 102.0, 320.0),
        trace_row("prefix", 1, 103.0, 352.0),
    ]
    text = printed(rows, trace="conversation.jsonl")
    assert "`conversation.jsonl`, replayed" in text and "of 2 replays" in text
    stock = "101.00 ms | 310.0 ms (inside 300.0 to 320.0)"
    ours = "101.00 ms | 351.0 ms (above 300.0 to 320.0)"
    end = "12.5 % | 18 of 20 | 1.50 | 0.5 ms |"
    assert f"| 2 | flashinfer | {stock} | {stock} | {end}" in text
    assert f"| 2 | prefix | {ours} | {ours} | {end}" in text
    ratio = "1.000 (0.971 to 1.030)"  # 99 / 102 to 103 / 100
    assert f"| 2 | prefix | {' | '.join([ratio] * 6)} |" in text
    assert "only 10 requests: there p99 lies between the two slowest" in text


@pytest.mark.parametrize(("sent", "few"), [(100, True), (101, False)])
def test_p99_is_a_percentile_above_100_requests(printed, sent, few):
    text = printed([trace_row("prefix", 0, 1.0, 3.0, sent)], trace="t")
    assert ("the two slowest" in text) == few


@pytest.mark.parametrize(
    "text", ["no markers", f"{report.END} {report.BEGIN}", f"{report.BEGIN}{report.BEGIN}"]
)
def test_a_readme_without_markers_is_refused(text):
    with pytest.raises(ValueError, match="bench:begin"):
        report.replace_between(text, "table\n")


@pytest.mark.parametrize("content", [b"", b"{}", b'{"meta": {"command": ""}, "rows": []}', b"[1]"])
def test_a_file_that_is_no_result_is_named(tmp_path, content, capsys):
    path = tmp_path / "odd.json"
    path.write_bytes(content)
    with pytest.raises(SystemExit):
        report.main([str(path)])
    assert "odd.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("page", "names", "options"),
    [
        ("README.md", ("serving_h200",), ("--short",)),
        (
            "docs/serving.md",
            (
                "serving_h200",
                "serving_rates_h200",
                "serving_loads_h200",
                "serving_h100",
                "serving_loads_h100",
                "serving_rates_h100",
                "serving_interval_h100",
                "serving_repeated_h100",
                "agents_h200",
                "agents_h100",
                "ttft_h200",
                "ttft_h100",
                "ttft_unshared_h100",
            ),
            (),
        ),
        (
            "docs/papers.md",
            (
                "papers_kernels_h200",
                "papers_ablations_h200",
                "papers_traces_h200",
                "papers_overhead_h200",
                "papers_expected",
            ),
            (),
        ),
        (
            "docs/measurements.md",
            (
                "kernel_h200_pat20",
                "kernel_h200_long",
                "kernel_h100_row_tiles",
                "kernel_h100_long",
                "policy_h200_fresh",
                "policy_h200",
                "policy_h100_row_tiles",
                "policy_h200_packs",
                "policy_h100",
                "trace_h200_fa3",
                "trace_h100",
                "engine_h200_sglang_0.5.23",
                "engine_h200_sglang_0.5.17",
                "engine_h200_triton",
                "engine_h100_sglang_0.5.17",
                "engine_h100",
            ),
            (),
        ),
    ],
)
def test_a_page_says_what_the_result_files_say(page, names, options):
    root = Path(report.__file__).resolve().parents[1]
    results = [root / "eval/results" / f"{name}.json" for name in names]
    arguments = [*map(str, results), "--readme", str(root / page), "--check", *options]
    assert report.main(arguments) == 0, f"run python -m eval.report with --readme {page}"
