"""Compiled functions: kept on disk where numba has a folder, and working where it has none."""

import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from numba import config
from numba.core.errors import NumbaWarning

from sgl_prefix_attn import jit
from tests.cpu.test_arrows import FILES, IMPORTS

PACKAGE = Path(jit.__file__).parent

# A process whose numba finds no cache folder, as in a read-only installation without a home.
NOWHERE = """
import importlib, logging, sys
from sgl_prefix_attn import jit
jit.folders = lambda: iter(())
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
for name in sys.argv[1:]:
    importlib.import_module(name)
from sgl_prefix_attn.plan.forest import build_forest
from tests.support.forests import path_table
print("unique:", build_forest(path_table([(-1, 4)], [0, 0], [6, 7])).unique_tokens)
"""


def twice(x):
    return 2 * x


LARGE = np.arange(1 << 20)


def of_large(i):
    return LARGE[i]


def compiled_modules() -> dict[str, str]:
    """Path in the package -> text, of modules with compiled functions."""
    texts = {str(p.relative_to(PACKAGE)): p.read_text() for p in PACKAGE.rglob("*.py")}
    return {path: text for path, text in texts.items() if "njit" in text and path != "jit.py"}


@pytest.mark.slow
def test_a_server_without_a_cache_folder_starts_and_says_so_once():
    names = [f"sgl_prefix_attn.{path[:-3].replace('/', '.')}" for path in compiled_modules()]
    assert "sgl_prefix_attn.plan.forest" in names
    for path, text in compiled_modules().items():
        assert "from numba import njit" not in text, path
    command = [sys.executable, "-c", NOWHERE, *names]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr
    assert "unique: 17" in done.stdout and done.stdout.count("NUMBA_CACHE_DIR") == 1


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    return tmp_path


def kept(folder) -> set[str]:
    assert list(folder.rglob("*.nbc"))
    return {path.parent.name for path in folder.rglob("*.nbi")}


def test_compiled_code_is_kept_where_there_is_a_folder(folder):
    assert jit.cached_njit(twice)(21) == 42
    assert len(kept(folder)) == 1


def test_what_was_kept_is_loaded_in_another_checkout_of_another_time(folder, monkeypatch):
    """Of the same sources: neither path nor time of the file counts."""
    jit.cached_njit(twice)(21)
    again = jit.cached_njit(twice)
    assert again(21) == 42 and sum(again.stats.cache_hits.values()) == 1
    assert not again.stats.cache_misses
    monkeypatch.setattr(jit, "_digest", lambda folder: "other sources")
    other = jit.cached_njit(twice)
    assert other(21) == 42 and not other.stats.cache_hits
    assert len(kept(folder)) == 2


@pytest.mark.parametrize("path", sorted(compiled_modules()))
def test_a_change_of_what_compiled_code_takes_from_elsewhere_compiles_it_again(path):
    """Functions that it calls, and constants, which numba's own cache overlooks: all that its
    module imports from the package is in the digest."""
    file = PACKAGE / path
    module = f"{PACKAGE.name}.{path[:-3].replace('/', '.')}"
    imported = {FILES[name] for name in IMPORTS[module] if name in FILES}
    imported = {path for path in imported if path.name not in ("__init__.py", "jit.py")}
    assert {file} | imported <= set(jit.sources(file.parent))


@pytest.mark.parametrize("pattern", jit._EVERYWHERE)
def test_each_pattern_of_sources_finds_files(pattern):
    """A file that was renamed would drop out of the digest without a word."""
    assert list(PACKAGE.glob(pattern))


def test_the_digest_is_that_of_the_sources(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    for folder in (first, second):
        folder.mkdir()
        (folder / "code.py").write_text("SIZE = 1")
    assert jit._digest(first) == jit._digest(second)
    jit._digest.cache_clear()
    (second / "code.py").write_text("SIZE = 2")
    assert jit._digest(first) != jit._digest(second)


def test_without_a_folder_of_the_users_it_is_kept_beside_the_package(no_home, monkeypatch):
    monkeypatch.setattr(config, "CACHE_DIR", "")
    assert list(jit.folders()) == [PACKAGE / "__pycache__"]


def test_a_folder_that_cannot_be_written_is_passed_over(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(jit, "folders", lambda: iter((tmp_path / "file", tmp_path / "b")))
    jit.cached_njit(twice)(1)
    assert kept(tmp_path / "b")


def test_a_cold_start_says_once_what_it_compiles(folder, monkeypatch, caplog):
    monkeypatch.setattr(jit, "LONG_S", -1.0)
    jit._log_once.cache_clear()
    other = types.FunctionType(twice.__code__, {"__name__": "somebody_elses"})
    jit.njit(other)(21)
    assert jit.njit(types.FunctionType(twice.__code__, {}))(21) == 42  # as exec() makes them
    assert not caplog.messages
    for _ in range(2):
        jit.cached_njit(types.FunctionType(twice.__code__, {"__name__": "sgl_prefix_attn.x"}))(21)
    (said,) = caplog.messages
    assert said.startswith("compiling the planner")


def test_another_error_of_numba_is_raised(monkeypatch):
    def refuse(function):
        raise RuntimeError("NUMBA_CPU_NAME is wrong")

    monkeypatch.setattr(jit, "_Cache", refuse)
    with pytest.raises(RuntimeError, match="NUMBA_CPU_NAME"):
        jit.cached_njit(twice)


def test_what_numba_cannot_keep_runs_nevertheless(folder):
    """A large constant is one case; with NUMBA_OPT=0 every function is."""
    with pytest.warns(NumbaWarning, match=f"Cannot cache .*{of_large.__name__}"):
        assert jit.cached_njit(of_large)(7) == 7
    assert not list(folder.rglob("*.nbc"))
