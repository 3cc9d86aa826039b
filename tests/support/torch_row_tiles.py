"""Servers of this machine as if it had a Hopper GPU: row tiles, run in torch."""

from types import SimpleNamespace

from sgl_prefix_attn.engine import build
from sgl_prefix_attn.execute.backends import gluon_backend
from sgl_prefix_attn.execute.backends.torch_row_tiles import TorchRowTiles

PASSED = SimpleNamespace(why_not=None)


def say_that_row_tiles_run(put=setattr):
    """Let servers that start on this machine choose row tiles, run in torch; put: setattr, or a
    monkeypatch's."""
    put(build, "why_no_row_tiles", lambda *args: None)
    put(gluon_backend, "GluonBackend", TorchRowTiles)
    put(build, "self_test_verdict", lambda *args, **again: PASSED)
