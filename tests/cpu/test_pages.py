"""The pages: links resolve, files that they name exist, and the worked example is what we print."""

import re
from io import StringIO
from pathlib import Path
from statistics import geometric_mean

import orjson
import pytest
from rich.console import Console

from eval.bench_agents.agent_tables import wall_ratios
from sgl_prefix_attn import __version__
from sgl_prefix_attn.cli import main
from sgl_prefix_attn.cli.explain_command import plan_view
from sgl_prefix_attn.explain import text

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"`([\w./-]+\.(?:py|json|jsonl|txt|log|png))`")
TEST = re.compile(r"`([\w./-]+\.py)::(\w+)`")
# Where a page's file names may begin.
FOLDERS = ("", "sgl_prefix_attn", "eval/results", "tests/gpu")
# Named, but not of this repository: what runs leave behind, and other projects' files.
ELSEWHERE = {"config.json", "trace.jsonl", "build/install.log"}


def prose(page: Path) -> str:
    """Without fenced blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


def test_the_pages_are_found():
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/architecture.md"} <= set(NAMES)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_relative_link_resolves(page):
    for target in LINK.findall(re.sub(r"`[^`\n]*`", "", prose(page))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file), target


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_file_that_is_named_exists(page):
    if page.name == "CHANGELOG.md":
        return  # names what was there then
    for name in set(FILE.findall(prose(page))) - ELSEWHERE:
        assert any((ROOT / folder / name).exists() for folder in FOLDERS), name
    for name, test in TEST.findall(prose(page)):
        assert f"def {test}(" in (ROOT / name).read_text(), f"{name}::{test}"


def test_the_readme_is_one_page():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110


def test_the_readme_s_first_numbers_are_the_result_files():
    def rows(name):
        return orjson.loads((ROOT / f"eval/results/{name}.json").read_bytes())["rows"]

    loads: dict[str, dict[str, float]] = {}
    for row in rows("serving_h200"):
        loads.setdefault(row["load"], {})[row["backend"]] = row["output_tokens_per_s"]
    served, unshared = loads["gsp"], loads["unshared"]
    h100 = {row["backend"]: row["output_tokens_per_s"] for row in rows("serving_h100")}
    even = unshared["prefix"] / max(unshared["default"], unshared["flashinfer"])
    agents = rows("agents_h200")
    ratios = wall_ratios(agents)
    mean = geometric_mean(r for (_, backend), r in ratios.items() if backend == "prefix")
    batch = {row["workload"]: row["ratio"] for row in rows("engine_h200_sglang_0.5.23")
             if row["backend"] == "flashinfer/prefix"}  # fmt: skip
    page = " ".join((ROOT / "README.md").read_text().split())
    first_screen = page.partition(" ## ")[0]
    for said in (
        f"**{served['prefix']:,.0f} output tokens/s",
        f"default reaches {served['default']:,.0f}**",
        f"backend {served['flashinfer']:,.0f}.",
        f"0.5.17: {h100['prefix']:,.0f}, {h100['default']:,.0f} and {h100['flashinfer']:,.0f}.",
        f"With nothing shared, throughput is **{even:.3f}** times that of the faster one",
        f"{agents[0]['count']} agent programs at once takes **{mean:.2f}** of the time",
    ):
        assert said in first_screen, said
    assert f"take {batch['shared8k']:.3f} of" in page
    assert f"share nothing {batch['unshared']:.3f}." in page
    chains, apart = (rows(f"speculative_{name}")[1]["ratio"] for name in ("h100", "unshared_h100"))
    assert f"it is {chains:.2f} of the default's on an H100, and {apart:.3f}." in page


def test_the_worked_example_is_what_explain_prints():
    arguments = ["explain", str(ROOT / "docs/images/six-requests.json"), "--kernels", "triton"]
    console = Console(width=100, file=StringIO(), highlight=False)
    console.print(text.render(plan_view(main.build_parser().parse_args(arguments))[0]))
    page = (ROOT / "docs/architecture.md").read_text()
    for line in console.file.getvalue().splitlines():
        assert line.rstrip() in page, f"docs/architecture.md lacks: {line}"


def test_the_changelog_has_this_version():
    page = (ROOT / "CHANGELOG.md").read_text()
    assert "## [Unreleased]" in page and f"## [{__version__}]" in page
