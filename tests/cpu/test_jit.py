"""Compiled functions: kept on disk where numba has a folder, and working where it has none."""

import subprocess
import sys
from pathlib import Path

import pytest
from numba.core import caching

from sgl_prefix_attn import jit

PACKAGE = Path(jit.__file__).parent
# they say why
UNCACHED = {"plan/workqueue.py", "plan/row_tile_words.py", "plan/row_tile_order.py"}

# A process whose numba finds no cache folder, as in a read-only installation without a home.
NOWHERE = """
import importlib, logging, sys
from numba.core import caching
caching.CacheImpl._locator_classes = []
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
for name in sys.argv[1:]:
    importlib.import_module(name)
from sgl_prefix_attn.plan.forest import build_forest
from tests.support.forests import path_table
print("unique:", build_forest(path_table([(-1, 4)], [0, 0], [6, 7])).unique_tokens)
"""


def twice(x):
    return 2 * x


def compiled_modules() -> dict[str, str]:
    """Path in the package -> text, of modules with compiled functions."""
    texts = {str(p.relative_to(PACKAGE)): p.read_text() for p in PACKAGE.rglob("*.py")}
    return {path: text for path, text in texts.items() if "njit" in text and path != "jit.py"}


def test_a_server_without_a_cache_folder_starts_and_says_so_once():
    names = [f"sgl_prefix_attn.{path[:-3].replace('/', '.')}" for path in compiled_modules()]
    assert "sgl_prefix_attn.plan.forest" in names
    for path, text in compiled_modules().items():
        assert (path in UNCACHED) == ("from numba import njit" in text), path
    command = [sys.executable, "-c", NOWHERE, *names]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr
    assert "unique: 17" in done.stdout and done.stdout.count("NUMBA_CACHE_DIR") == 1


def test_compiled_code_is_kept_where_there_is_a_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(caching.config, "CACHE_DIR", str(tmp_path))
    assert jit.cached_njit(twice)(21) == 42
    assert list(tmp_path.rglob("*.nbc")) and list(tmp_path.rglob("*.nbi"))


def test_another_error_of_numba_is_raised(monkeypatch):
    def refuse(**options):
        raise RuntimeError("NUMBA_CPU_NAME is wrong")

    monkeypatch.setattr(jit, "njit", refuse)
    with pytest.raises(RuntimeError, match="NUMBA_CPU_NAME"):
        jit.cached_njit(twice)
