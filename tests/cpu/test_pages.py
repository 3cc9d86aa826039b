"""The pages: links resolve, files that they name exist, and the worked example is what we print."""

import importlib.util
import re
import subprocess
from io import StringIO
from pathlib import Path

import pytest
from packaging.version import Version
from rich.console import Console

from eval.pages import blocks
from sgl_prefix_attn import __version__
from sgl_prefix_attn.tools import main
from sgl_prefix_attn.tools.explain import text
from sgl_prefix_attn.tools.explain_command import plan_view
from sgl_prefix_attn.tools.plan_spec import read_spec

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
RESULTS = sorted((ROOT / "eval/results").glob("*.md"))
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"`([\w./-]+\.(?:py|json|jsonl|txt|log|png))`")
IN_FILE = re.compile(r"`(\w+)`\s+in\s+`([\w./-]+\.py)`")
TEST = re.compile(r"`([\w./-]+\.py)::(\w+)`")
COMMAND = re.compile(r"python\s+-m\s+((?:eval|sgl_prefix_attn)[\w.]*)")
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


@pytest.mark.parametrize("page", [*PAGES, *RESULTS], ids=lambda page: page.stem)
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
    for word, name in IN_FILE.findall(prose(page)):
        texts = [(ROOT / f / name).read_text() for f in FOLDERS if (ROOT / f / name).exists()]
        assert any(re.search(rf"\b{word}\b", text) for text in texts), f"{word} in {name}"


COMMIT = re.compile(r"\b(?=\d*[a-f])(?=[a-f]*\d)[0-9a-f]{7}\b")


def test_every_commit_that_is_cited_is_in_the_repository():
    def git(*args):
        return subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True)

    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("no repository with its whole history")
    texts = [page.read_text() for page in [*PAGES, *RESULTS]]
    cited = {name for text in texts for name in COMMIT.findall(text)}
    assert len(cited) > 20
    missing = {name for name in cited if git("cat-file", "-e", f"{name}^{{commit}}").returncode}
    assert missing == set()


@pytest.mark.parametrize("page", [*PAGES, *RESULTS], ids=lambda page: page.stem)
def test_every_command_that_is_named_exists(page):
    """But for those of result files, which are of the file's commit."""
    if page.name == "CHANGELOG.md":
        return  # names what was there then
    for name in set(COMMAND.findall(blocks.BLOCK.sub("", page.read_text()))):
        assert importlib.util.find_spec(name.rstrip(".")), name


def test_the_readme_is_one_page():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 90


# --- numbers: measurements stand in generated tables (tests/eval/test_report.py), never in prose --
MEASURED = re.compile(
    r"\d\.\d|\d ?%|\d (?:us|µs|ms|microseconds|seconds|s|[TG]B/s|TFLOP/s|times|tokens/s)\b"
)
# Versions, sections of papers, names, and limits that somebody set.
SET = re.compile(
    r"\d+\.\d+\.\d+|§\d+(?:\.\d+)?|(?:Python|capability|Apache-) ?\d+\.\d+"
    r"|(?:Llama-|Qwen|GLM-|Ernie|Step-) ?\d+\.\d+"
    r"|3\.1[0-2]|at most 1\.\d\d|more than 3 % and 2 us|by 1 % and 1 us|95 % intervals|At 70 %"
)
NUMBER_PAGES = [page for page in PAGES if page.name not in ("CHANGELOG.md", "kernel-log.md")]


def told(page: Path) -> str:
    """A page without generated tables, code, where links lead, and what is no measurement."""
    text = re.sub(r"^ {4}.*$", "", blocks.BLOCK.sub("", prose(page)), flags=re.MULTILINE)
    return SET.sub("", LINK.sub("]", re.sub(r"`[^`\n]*`", "", text)))


@pytest.mark.parametrize("page", NUMBER_PAGES, ids=lambda page: page.name)
def test_measurements_are_not_typed_into_prose(page):
    found = [line for line in told(page).splitlines() if MEASURED.search(line)]
    assert found == [], "a table of eval/pages says it, or it leaves"


def test_a_measurement_in_prose_is_found(tmp_path):
    page = tmp_path / "page.md"
    for typed in ("takes 0.66 of", "is 3 % slower", "a plan of 45 us", "11,321 tokens/s"):
        page.write_text(f"With SGLang 0.5.23 it {typed}.\n")
        assert MEASURED.search(told(page)), typed


def test_the_worked_example_is_what_explain_prints():
    arguments = ["explain", str(ROOT / "docs/images/six-requests.json")]
    console = Console(width=100, file=StringIO(), highlight=False)
    paths, _ = read_spec(arguments[1])
    console.print(text.render(plan_view(paths, main.build_parser().parse_args(arguments))))
    page = (ROOT / "docs/architecture.md").read_text()
    for line in console.file.getvalue().splitlines():
        assert line.rstrip() in page, f"docs/architecture.md lacks: {line}"


def test_the_changelog_has_this_version():
    """Under its own name once it is released."""
    page, version = (ROOT / "CHANGELOG.md").read_text(), Version(__version__)
    assert "## [Unreleased]" in page
    assert (f"## [{version.base_version}]" in page) != version.is_devrelease
