"""New tokens' keys and values into a KV cache of float8_e4m3fn: divided, rounded and stored.

One launch in a CUDA graph takes about as long as one of the five that torch makes of it.
"""

import triton
import triton.language as tl


@triton.jit
def store_kv_kernel(
    k_ptr,  # [rows, k_width], rows stride_k apart
    v_ptr,  # [rows, v_width], rows stride_v apart
    k_cache_ptr,  # float8_e4m3fn [slots, k_width], slots stride_k_cache apart, written
    v_cache_ptr,  # float8_e4m3fn [slots, v_width], slots stride_v_cache apart, written
    slots_ptr,  # int [>= rows], stride_slots apart
    k_scale,
    v_scale,
    stride_k,
    stride_v,
    stride_k_cache,
    stride_v_cache,
    stride_slots,
    k_width,
    v_width,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store a row in two programs, one for keys and one for values. Grid (rows, 2).

    PDL: it is a programmatic dependent launch, and lets the next one begin.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i_row = tl.program_id(0).to(tl.int64)
    i_slot = tl.load(slots_ptr + i_row * stride_slots).to(tl.int64)
    if tl.program_id(1) == 0:
        p_row, p_slot = k_ptr + i_row * stride_k, k_cache_ptr + i_slot * stride_k_cache
        _store_row(p_row, p_slot, k_scale, k_width, STEP)
    else:
        p_row, p_slot = v_ptr + i_row * stride_v, v_cache_ptr + i_slot * stride_v_cache
        _store_row(p_row, p_slot, v_scale, v_width, STEP)


@triton.jit
def _store_row(p_row, p_slot, scale, width, STEP: tl.constexpr):
    for i in range(0, width, STEP):
        offs = i + tl.arange(0, STEP)
        b_x = tl.load(p_row + offs, mask=offs < width)
        # a quotient is rounded to the model's dtype first, as where SGLang divides in place
        b_x = tl.div_rn(b_x.to(tl.float32), scale).to(b_x.dtype).to(tl.float32)
        tl.store(p_slot + offs, b_x.to(tl.float8e4nv), mask=offs < width)
