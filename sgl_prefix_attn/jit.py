"""The package's own njit: compiled code is kept on disk, where there is a folder for it, under a
digest of the sources that it comes from."""

import functools
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from numba import config, njit
from numba.core import event
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator

logger = logging.getLogger(__name__)
_log_once = functools.cache(logger.log)

PACKAGE = Path(__file__).parent
# Constants and functions that compiled code of any folder takes from elsewhere.
_EVERYWHERE = ("plan/*.py", "kernels/words.py", "records.py")
LONG_S = 2.0  # of compiling: a machine that has not run this before


def cached_njit(function: Callable) -> Callable:
    """Apply njit and keep what it compiles, or njit alone where there is no folder to write to.

    Not njit(cache=True), whose files hold for one path and time of the source, so that a fresh
    installation compiles again, and not for the constants that the function takes from other
    modules. A read-only installation without a home folder must serve nevertheless.
    """
    compiled = njit(function)
    try:
        compiled._cache = _Cache(function)
    except RuntimeError as error:
        if "no locator available" not in str(error):  # a bad NUMBA_* variable
            raise
        _log_once(
            logging.INFO,
            "the planner is compiled at every start, which takes up to a minute: numba can write "
            "to no cache folder; NUMBA_CACHE_DIR names one",
        )
    return compiled


def user_cache(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return sgl_prefix_attn in $XDG_CACHE_HOME or ~/.cache; None for a user without a home
    folder."""
    try:
        base = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # neither HOME nor an entry in the user database
        return None
    return Path(base) / "sgl_prefix_attn"


def folders() -> Iterator[Path]:
    """Where compiled code may be kept, best first; those that cannot be written are passed over."""
    if config.CACHE_DIR:
        yield Path(config.CACHE_DIR)
        return
    if (cache := user_cache()) is not None:
        yield cache / "compiled"
    yield PACKAGE / "__pycache__"


def sources(folder: Path) -> list[Path]:
    """The files that a function compiled in `folder` depends on: its own, and the planner's."""
    every = [path for pattern in _EVERYWHERE for path in PACKAGE.glob(pattern)]
    return sorted({*every, *folder.glob("*.py")})


@functools.cache
def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sources(folder):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


class _BySources(_CacheLocator):
    """Says where numba keeps a function: in a folder named after the digest of its sources."""

    def __init__(self, function: Callable, py_file: str, folder: Path):
        self._line, self._folder = function.__code__.co_firstlineno, folder
        self._py_file = py_file  # numba's warnings name it

    def get_cache_path(self) -> str:
        return str(self._folder)

    def get_source_stamp(self) -> str:
        return self._folder.name

    def get_disambiguator(self) -> str:
        return str(self._line)

    @classmethod
    def from_function(cls, py_func: Callable, py_file: str) -> "_BySources | None":
        for folder in folders():
            found = cls(py_func, py_file, folder / _digest(Path(py_file).parent))
            try:
                found.ensure_cache_path()
            except OSError:
                continue
            return found
        return None


class _CacheImpl(CompileResultCacheImpl):
    _locator_classes = [_BySources]


class _Cache(FunctionCache):
    _impl_class = _CacheImpl


class _SaysSo(event.Listener):
    """Says once, while it goes on, that the package's functions have been compiling for a while."""

    def __init__(self) -> None:
        self._depth, self._start, self._spent = 0, 0.0, 0.0

    def notify(self, event: Any) -> None:
        # Others may use numba in this process, too; what they exec() has no module.
        module = event.data["dispatcher"].py_func.__module__ or ""
        if module.startswith(f"{PACKAGE.name}."):
            super().notify(event)

    def on_start(self, event: Any) -> None:
        if self._depth == 0:
            self._start = time.monotonic()
        self._depth += 1
        if self._spent + time.monotonic() - self._start > LONG_S:
            _log_once(
                logging.WARNING,
                "compiling the planner, up to a minute on the first start of this version",
            )

    def on_end(self, event: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._spent += time.monotonic() - self._start


event.register("numba:compile", _SaysSo())
