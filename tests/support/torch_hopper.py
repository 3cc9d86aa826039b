"""Servers of this machine as if it had a Hopper GPU: its plans, run in torch."""

from types import SimpleNamespace

from sgl_prefix_attn.api import wrapper
from sgl_prefix_attn.execute.backends import hopper_backend
from sgl_prefix_attn.execute.backends.torch_backend import TorchBackend
from sgl_prefix_attn.kernels import words as W

PASSED = SimpleNamespace(why_not=None)


class TorchHopper(TorchBackend):
    """Stands for HopperBackend: tiles of as many rows, and no nodes that are split off."""

    splits_nodes = False

    def __init__(self, heads, dtype, device, pdl=False, part_tokens=0):
        super().__init__(heads, dtype, device, W.TILE_ROWS, part_tokens)


def wrappers_as_on_hopper(patch):
    """Let the library choose Hopper's kernels, run in torch."""
    patch.setattr(wrapper, "why_no_hopper", lambda *args: None)
    patch.setattr(hopper_backend, "HopperBackend", TorchHopper)


def as_on_hopper(put=setattr):
    """Let servers that start on this machine choose Hopper's kernels, run in torch; put: setattr,
    or a monkeypatch's."""
    from sgl_prefix_attn.engine import build

    put(build, "why_no_hopper", lambda *args: None)
    put(hopper_backend, "HopperBackend", TorchHopper)
    put(build, "self_test_verdict", lambda *args, **again: PASSED)
