"""Softmax of a warpgroup's 64 rows, a block of columns at a time."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .shape import HALF_ROWS, LOG2_E


@gluon.jit
def quad_sum(x):
    """Sums [64, 4] of what each thread of a quad holds of its rows of x [64, columns]: lanes are
    added once, at the end of an item."""
    return gl.sum(gl.sum(gl.reshape(x, [HALF_ROWS, x.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def softmax_step(s, b_max, b_sum, scale):
    """Online softmax in base 2 over scores s [64, columns], -inf where masked: probabilities, the
    new state, and what the old results shrink by."""
    new_max = gl.maximum(b_max, gl.max(s, 1) * scale)
    p = gl.exp2(s * scale - new_max[:, None])
    alpha = gl.exp2(b_max - new_max)
    part = quad_sum(p)
    b_sum = b_sum * gl.convert_layout(alpha, gl.SliceLayout(1, part.type.layout))[:, None] + part
    return p, new_max, b_sum, alpha


@gluon.jit
def soft_cap(s, inner, outer):
    """outer * tanh(s * inner): exact to a few ulp of outer, unlike tanh.approx."""
    return outer - (2.0 * outer) / (gl.exp2(s * (inner * 2 * LOG2_E)) + 1.0)


@gluon.jit
def keep_visible(s, key, row, BIT_KEYS: gl.constexpr, GROUP: gl.constexpr):
    """-inf in the columns that a row must not see; key as in words.py."""
    if BIT_KEYS:
        seen = (key[None, :] & (1 << (row // GROUP))[:, None]) != 0
    else:
        seen = (row[:, None] >= (key & 0xFFFF)[None, :]) & (row[:, None] < (key >> 16)[None, :])
    return gl.where(seen, s, float("-inf"))
