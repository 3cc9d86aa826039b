"""eval.report: the pages' tables are what the result files say."""

from itertools import product
from pathlib import Path

import pytest

from eval import provenance, report
from eval.pages import blocks, decisions, routers, servers

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
    return [str(kernels), str(engines)]


def test_tables_and_sources(files, capsys):
    assert report.main(files) == 0
    text = capsys.readouterr().out
    assert "| `1,2_8,8` | 10 | 20.0 (2.00) | 50.0 (5.00) | 25.0 (2.50) | 1.25 |" in text
    assert "- fa3: wrong: error 1e-01" in text
    assert "- pat: run at page size 32; timed without a CUDA graph" in text
    assert "Best stock peer of each tree: 5.00" in text and "321 us" in text
    assert "NVIDIA H100 80GB HBM3, driver 580.1; torch 2.11.0; commit abc123;" in text
    assert "commit abc123 with local changes" in text
    assert "`python -m eval.bench_kernel --trees pat20`" in text
    assert "| shared8k | prefix | 9.00 | 0.600 |" in text
    assert "| shared8k | flashinfer | 15.00 | 1.000 |" in text


def test_every_result_has_figures_or_is_refused_by_its_command(capsys):
    told = 0
    for path in sorted(provenance.ROOT.glob("eval/results/*.json")):
        try:
            assert report.main([str(path)]) == 0 and "| --- |" in capsys.readouterr().out
            told += 1
        except SystemExit:
            said = provenance.load(path)["meta"]["command"]
            assert f"{path.name}: no figures are printed of {said}" in capsys.readouterr().err
    assert told


@pytest.fixture
def pages(tmp_path, monkeypatch):
    """Two pages, one with a table of its own, and what the tables say."""
    tables = {"times": lambda: "| 20.0 us |"}
    monkeypatch.setattr(blocks, "TABLES", tables)
    monkeypatch.setattr(blocks, "PAGES", ("a.md", "b.md"))
    monkeypatch.setattr(blocks.stale, "__defaults__", (tmp_path,))
    (tmp_path / "a.md").write_text("# A\n\n<!-- table: times -->\nold\n<!-- end -->\n\nrest\n")
    (tmp_path / "b.md").write_text("# B\n")
    return tmp_path, tables


def test_pages_are_written_and_checked(pages, capsys):
    folder, tables = pages
    assert report.main(["--check"]) == 1
    assert "a.md is not what the result files say" in capsys.readouterr().out
    assert report.main([]) == 0
    written = "# A\n\n<!-- table: times -->\n| 20.0 us |\n<!-- end -->\n\nrest\n"
    assert (folder / "a.md").read_text() == written and (folder / "b.md").read_text() == "# B\n"
    assert report.main(["--check"]) == 0
    assert blocks.BLOCK.sub("", written) == "# A\n\n\n\nrest\n"
    tables["times"] = lambda: "| 21.0 us |"
    assert report.main(["--check"]) == 1


def test_a_table_that_nobody_makes_is_named(pages, capsys):
    (pages[0] / "b.md").write_text("<!-- table: speeds -->\n<!-- end -->\n")
    with pytest.raises(SystemExit):
        report.main([])
    assert "'speeds': known are times" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"{}", b'{"meta": {"command": ""}, "rows": []}', b"[1]"])
def test_a_file_that_is_no_result_is_named(tmp_path, content, capsys):
    path = tmp_path / "odd.json"
    path.write_bytes(content)
    with pytest.raises(SystemExit):
        report.main([str(path)])
    assert "odd.json" in capsys.readouterr().err


def test_the_pages_say_what_the_result_files_say():
    assert [str(page) for page, _ in blocks.stale()] == [], "run python -m eval.report"


def test_every_table_stands_on_one_page():
    root = Path(report.__file__).resolve().parents[1]
    found = [name for page in blocks.PAGES
             for name, _ in blocks.BLOCK.findall((root / page).read_text())]  # fmt: skip
    assert sorted(found) == sorted(blocks.TABLES)


def test_a_shortened_command_names_every_other_file():
    others = "eval.x --from a.json --json c/another-a.json && eval.y"
    command = others.replace("eval.", "python -m eval.") + " --json c/a.json"
    assert decisions.shortened(command, "a.json") == others
    assert decisions.shortened("python a.py a.json", "a.json") == "python a.py a.json"


@pytest.mark.parametrize(
    ("prefix", "stock", "says"),
    [
        ([103], [100], "1.03x"),
        ([101], [100], "no difference"),
        ([97], [100], "0.97x"),
        ([80, 120], [100], "no difference"),  # its servers are on both sides
        ([103, 163], [90, 101], "no difference"),  # the slower one is hardly faster
        ([104, 164], [90, 110], "no difference"),
        ([112, 168], [80, 80], "1.40x to 2.10x"),
        ([159, 161], [80, 80], "2.00x"),
    ],
)
def test_the_readme_tells_no_difference_within_that_of_servers(prefix, stock, says, server_files):
    """Two servers of one backend are 2 % apart on a fast host."""
    server_files["usual"] = [*served("default", 100, 102), *served("prefix", 200, 201)]
    server_files["slow"] = [*served("default", *stock), *served("prefix", *prefix)]
    assert f"({says}) |" in servers.readme()


def test_the_readme_says_what_was_streamed_by_a_slow_host(server_files, monkeypatch):
    server_files["usual"] = server_files["slow"] = [
        row | {"rate": rate}
        for row in (*served("default", 100), *served("prefix", 100))
        for rate in ("inf", "offline")
    ]
    each = product(server_files, ("inf", "offline"))
    titles = tuple(((name,), "gsp", rate, f"{name} {rate}") for name, rate in each)
    monkeypatch.setattr(servers, "README_ROWS", titles)
    text = servers.readme()
    assert "| usual inf, streamed |" in text and "| slow inf, streamed by a slow host |" in text
    assert "| usual offline |" in text and "| slow offline |" in text


def test_a_server_that_left_requests_out_is_in_no_table(server_files):
    left_out = [row | {"completed": 9} for row in served("prefix", 100)]
    server_files["usual"] = server_files["slow"] = left_out
    with pytest.raises(ValueError, match=r"usual: 9 of 10 completed"):
        servers.readme()


@pytest.fixture
def server_files(monkeypatch):
    """Result server_files by name, of which servers' tables are made."""
    found: dict[str, list[dict]] = {}
    monkeypatch.setattr(servers, "FILES", ((("usual",), "A"), (("slow",), "B, a slow host")))
    monkeypatch.setattr(servers, "README_ROWS", ((("slow",), "gsp", "offline", "title"),))
    monkeypatch.setattr(servers, "rows", found.__getitem__)
    monkeypatch.setattr(servers, "place", lambda name: "here")
    monkeypatch.setattr(servers, "source", lambda *names: "")
    return found


def served(backend, *tokens):
    return [
        {"backend": backend, "load": "gsp", "rate": "offline", "output_tokens_per_s": x,
         "sent": 10, "completed": 10}
        for x in tokens
    ]  # fmt: skip


def test_a_table_of_routers_has_medians_and_tells_what_is_missing():
    def rows(backend, *tokens):
        return [
            {"backend": backend, "load": "gsp", "rate": "offline", "policy": "round_robin",
             "output_tokens_per_s": x, "cached_share": 0.5, "requests": [1, 2]}
            for x in tokens
        ]  # fmt: skip

    both = routers.of_routers([*rows("default", 100, 100), *rows("prefix", 150, 250)])
    assert "| `gsp`, offline | round robin | 100 | 200 | 2.00 | 50%, 50% | 1 + 2 |" in both
    assert "| 100 | - | - | 50%, - | 1 + 2 |" in routers.of_routers(rows("default", 100))
