"""A kernel that leaves barriers of other counts, half arrived at, all over shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

MOST = 227 * 1024 // 8  # barriers that the shared memory of a CTA has room for


@gluon.jit
def leave_barriers(COUNT: gl.constexpr):
    """Make so many barriers for three arrivals, from the first to the last, and arrive once."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in range(COUNT):
        mbarrier.init(bars.index(i), count=3)
        mbarrier.arrive(bars.index(i), count=1)
