"""A pytest plugin for what Triton's interpreter runs: a launch patches triton.language for all that
the kernel calls, so calls need not; their doing so was a third of the time."""

from types import SimpleNamespace

import triton.language as tl
from triton.runtime import interpreter

_patch = interpreter._patch_lang
_LANGUAGE = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})


def _call(self, *args, **kwargs):
    return self.rewrite()(*args, **kwargs)


interpreter._patch_lang = lambda kernel: _patch(_LANGUAGE)
interpreter.InterpretedFunction.__call__ = _call
