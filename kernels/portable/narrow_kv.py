"""Keys and values of float8_e4m3fn in the portable kernel: all of them are half precision, too."""

import triton
import triton.language as tl

# The largest element of a query becomes this or up to twice as much.
_TOP = tl.constexpr(256.0)
_EXPONENT = tl.constexpr(0x7F800000)  # of a float32


@triton.constexpr_function
def is_narrow(dtype):
    """Say whether a cache of this dtype has a byte an element."""
    return dtype.primitive_bitwidth == 8


@triton.constexpr_function
def product_dtype(dtype):
    """Return what elements of a cache of this dtype are multiplied as."""
    return tl.float16 if dtype.primitive_bitwidth == 8 else dtype


@triton.jit
def widen(x):
    """Return elements of a cache as they are multiplied."""
    return x.to(product_dtype(x.dtype))


@triton.jit
def scaled_queries(q, scale):
    """Return queries [M, D] in half precision, each divided by a power of two that keeps it in
    range and all its bits, and the scores' scale [M, 1] that undoes it."""
    x = q.to(tl.float32)
    most = tl.maximum(tl.max(tl.abs(x), 1), 1e-30)
    unit = (most.to(tl.int32, bitcast=True) & _EXPONENT).to(tl.float32, bitcast=True) / _TOP
    return (x / unit[:, None]).to(tl.float16), (scale * unit)[:, None]
