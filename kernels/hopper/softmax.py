"""Online softmax of a warpgroup's 64 rows, a block of columns at a time.

A row's maximum is taken anew only where a score exceeds it by more than _SLACK: until then its sum
and results stay in range, and nothing of them is rescaled (as in FlashAttention-4). Each thread
looks at its own scores and its warp votes, so that most blocks pass without an exchange of maxima
between lanes, and without touching the results.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .shape import HALF_ROWS, LOG2_E

# 8, as PTX writes it: probabilities up to 2^8 have as many bits in half precision as those below 1.
_SLACK = "0f41000000"


def _grow(maxima: str, registers: str) -> gl.constexpr:
    """Return PTX: $0, $1 are the maxima $6, $7 of a thread's two rows and $2, $3 are 1; or, where a
    score of its warp exceeds one by more than _SLACK, what `maxima` makes of its quad's scores $4,
    $5 and the old ones, and 2 to the power of the differences."""
    return gl.constexpr(f"""{{
    .reg .pred over;
    .reg .f32 {registers};
    add.f32 a, $6, {_SLACK};
    add.f32 b, $7, {_SLACK};
    setp.gt.f32 over, $4, a;
    setp.gt.or.f32 over, $5, b, over;
    vote.sync.any.pred over, over, 0xffffffff;
    mov.f32 $0, $6;
    mov.f32 $1, $7;
    mov.f32 $2, 0f3F800000;
    mov.f32 $3, 0f3F800000;
    @!over bra within;
{maxima}
    sub.f32 a, $6, $0;
    sub.f32 b, $7, $1;
    ex2.approx.ftz.f32 $2, a;
    ex2.approx.ftz.f32 $3, b;
    within:
}}""")


# The largest of the quad's scores and the old maximum.
GROW = _grow(
    """    shfl.sync.bfly.b32 a, $4, 1, 0x1f, 0xffffffff;
    shfl.sync.bfly.b32 b, $5, 1, 0x1f, 0xffffffff;
    max.f32 a, a, $4;
    max.f32 b, b, $5;
    max.f32 $0, $0, a;
    max.f32 $1, $1, b;
    shfl.sync.bfly.b32 a, a, 2, 0x1f, 0xffffffff;
    shfl.sync.bfly.b32 b, b, 2, 0x1f, 0xffffffff;
    max.f32 $0, $0, a;
    max.f32 $1, $1, b;""",
    "a, b",
)
# The same where each row decides for itself, so that its bits do not depend on others of the warp:
# its maximum becomes that of its quad's scores where that exceeds it by more than _SLACK.
GROW_BY_ROW = _grow(
    f"""    shfl.sync.bfly.b32 c, $4, 1, 0x1f, 0xffffffff;
    shfl.sync.bfly.b32 d, $5, 1, 0x1f, 0xffffffff;
    max.f32 c, c, $4;
    max.f32 d, d, $5;
    shfl.sync.bfly.b32 a, c, 2, 0x1f, 0xffffffff;
    shfl.sync.bfly.b32 b, d, 2, 0x1f, 0xffffffff;
    max.f32 c, c, a;
    max.f32 d, d, b;
    add.f32 a, $6, {_SLACK};
    add.f32 b, $7, {_SLACK};
    setp.gt.f32 over, c, a;
    selp.f32 $0, c, $6, over;
    setp.gt.f32 over, d, b;
    selp.f32 $1, d, $7, over;""",
    "a, b, c, d",
)

PRODUCT = gl.constexpr("mul.f32 $0, $1, $2;")


@gluon.constexpr_function
def shrunk_results(n):
    """Return PTX: a thread's n results, in place, times their factors from ${2n} on if any of its
    warp's is not 1; and its operands. Pairs of results belong to the thread's two rows in turn."""
    lines = [
        "{ .reg .pred shrinks;",
        f"setp.neu.f32 shrinks, ${2 * n}, 0f3F800000;",
        f"setp.neu.or.f32 shrinks, ${2 * n + 2}, 0f3F800000, shrinks;",
        "vote.sync.any.pred shrinks, shrinks, 0xffffffff;",
        "@!shrinks bra same;",
        *(f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n)),
        "same: }",
    ]
    in_place = [str(i) for i in range(n)]
    return "\n".join(lines), ",".join(["=&f"] * n + in_place + ["f"] * n)


@gluon.jit
def product(x, y):
    """Return x * y, computed once: with head dim 256 the compiler would make a plain product anew
    in each block, from factors that it then spills."""
    return gl.inline_asm_elementwise(
        PRODUCT, "=f,f,f", [x, y], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def by_quads(x):
    """Return x [64, columns] as [64, columns / 8, 4, 2]: the third axis counts the four threads of
    a row, each of which has everything on the second and fourth."""
    return gl.reshape(x, [HALF_ROWS, x.shape[1] // 8, 4, 2])


@gluon.jit
def from_quads(x, like):
    """Turn it the other way round, as `like` is laid out."""
    return gl.convert_layout(gl.reshape(x, like.shape), like.type.layout)


@gluon.jit
def to_quads(x):
    """Return what each thread holds of its rows, x [64, 4], as [64, 1, 4, 1]."""
    return gl.expand_dims(gl.expand_dims(x, 2), 1)


@gluon.jit
def of_quads(x, like):
    """Return numbers of rows, x [64], as `like` [64, 4] has those of its threads."""
    return gl.convert_layout(x, gl.SliceLayout(1, like.type.layout))[:, None] + like * 0.0


@gluon.jit
def thread_sum(x):
    """Return sums [64, 4] of what each thread has of its rows of x [64, columns / 8, 4, 2]: lanes
    are added once, at the end of an item. Columns come first, here and for maxima: a thread then
    has four chains, where two would wait for each other."""
    return gl.sum(gl.sum(x, 1), 2)


@gluon.jit
def grow(s, b_max, scale, BY_ROW: gl.constexpr):
    """Return maxima that scores s [64, columns], -inf where masked, times scale keep in range, and
    what the old results and sums shrink by. All but s are [64, 4], the same in a row's four
    threads. BY_ROW: each row decides for itself."""
    top = gl.max(gl.max(by_quads(s), 1), 2) * scale
    return gl.inline_asm_elementwise(
        GROW_BY_ROW if BY_ROW else GROW,
        "=&f,=&f,=&f,=&f,f,f,f,f",
        [top, b_max],
        dtype=(gl.float32, gl.float32),
        is_pure=False,
        pack=2,
    )


@gluon.jit
def probabilities(s, b_max, scale):
    """Return 2 ^ (s * scale - b_max), and its sums [64, 4] of each thread."""
    p = gl.exp2(by_quads(s) * scale - to_quads(b_max))
    return from_quads(p, s), thread_sum(p)


@gluon.jit
def shrink(acc, alpha):
    """Return acc [64, D] times alpha [64, 4] of grow, which is 1 for most blocks."""
    x = by_quads(acc)
    LAYOUT: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(1, x.type.layout))
    factors, x = gl.broadcast(to_quads(gl.convert_layout(alpha, LAYOUT)), x)
    ASM: gl.constexpr = shrunk_results(acc.shape[1] // 2)
    x = gl.inline_asm_elementwise(
        ASM[0], ASM[1], [x, factors], dtype=gl.float32, is_pure=False, pack=acc.shape[1] // 2
    )
    return from_quads(x, acc)


@gluon.jit
def with_sink(inv, row_max, total, sinks_ptr, head, row, S):
    """Return what a whole row's results are multiplied by, its maximum and its sum, all [rows],
    with the sink of its head: one more logit, in base 2, that has no value."""
    if S.HAS_SINK:
        sink = gl.load(sinks_ptr + head * S.GROUP + row % S.GROUP).to(gl.float32) * LOG2_E
        new_max = gl.maximum(row_max, sink)
        shrunk = gl.exp2(row_max - new_max)
        total = total * shrunk + gl.exp2(sink - new_max)
        inv = gl.where(total == 0, 0.0, shrunk / total)
        row_max = new_max
    return inv, row_max, total


@gluon.jit
def soft_cap(s, inner, outer):
    """Return outer * tanh(s * inner): exact to a few ulp of outer, unlike tanh.approx."""
    return outer - (2.0 * outer) / (gl.exp2(s * (inner * 2 * LOG2_E)) + 1.0)


@gluon.jit
def keep_visible(s, key, row, BIT_KEYS: gl.constexpr, GROUP: gl.constexpr):
    """Put -inf in the columns that a row must not see; key as in words.py."""
    if BIT_KEYS:
        seen = (key[None, :] & (1 << (row // GROUP))[:, None]) != 0
    else:
        seen = (row[:, None] >= (key & 0xFFFF)[None, :]) & (row[:, None] < (key >> 16)[None, :])
    return gl.where(seen, s, float("-inf"))
