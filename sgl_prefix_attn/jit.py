"""The package's own njit: compiled code is kept on disk, where there is a folder for it."""

import functools
import logging
from collections.abc import Callable

from numba import njit

logger = logging.getLogger(__name__)
_log_once = functools.cache(logger.info)


def cached_njit(function: Callable) -> Callable:
    """Apply njit(cache=True), or plain njit where numba finds no folder to write to.

    numba looks at NUMBA_CACHE_DIR, beside the source file and in the user's cache folder, and
    raises RuntimeError: a read-only installation without a home folder must serve nevertheless.
    """
    try:
        return njit(cache=True)(function)
    except RuntimeError as error:
        if "no locator available" not in str(error):  # a bad NUMBA_* variable
            raise
        _log_once(
            "the planner is compiled at every start, which takes some seconds: numba can write to "
            "no cache folder; NUMBA_CACHE_DIR names one"
        )
        return njit(function)
