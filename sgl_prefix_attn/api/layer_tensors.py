"""What run() takes for a layer: caches viewed as slots, and tensors that fit the plan."""

from typing import Any

import torch

from sgl_prefix_attn.api.argument_checks import refused, tensor
from sgl_prefix_attn.records import HeadConfig


def slot_caches(kv_cache: Any, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of run()'s kv_cache as slots. Raises ValueError naming the one that is no view
    of slots."""
    try:
        k_cache, v_cache = kv_cache
    except (TypeError, ValueError):
        raise refused("kv_cache", "be a pair (k, v)", type(kv_cache).__name__) from None
    k_cache = slots_view("kv_cache[0]", k_cache, page_size)
    return k_cache, slots_view("kv_cache[1]", v_cache, page_size)


def slots_view(name: str, cache: torch.Tensor, page_size: int) -> torch.Tensor:
    """View a cache [pages, page_size, Hkv, D] as [slots, Hkv, D]; one of slots stays as it is.

    Kernels step from slot to slot by one stride, and find a slot's heads side by side: pages of an
    interleaved K and V, or of one head after the other, are no such view. Raises ValueError naming
    the cache and what stands against it; of pages [pages, Hkv, page_size, D], what to pass.
    """
    if not isinstance(cache, torch.Tensor) or cache.ndim != 4:
        return cache
    pages, tokens = cache.shape[:2]
    if tokens != page_size:
        hint = ""
        if cache.shape[2] == page_size:
            hint = f"; of [pages, heads, page_size, head_dim] pass {name}.transpose(1, 2)"
        wanted = f"have shape (pages, {page_size}, heads, head_dim) or (slots, heads, head_dim)"
        raise refused(name, wanted, f"{tuple(cache.shape)}{hint}")
    by_page, by_token, by_head, _ = cache.stride()
    if cache.shape[2] > 1 and by_head != cache.shape[3]:
        raise refused(
            name,
            "have a token's heads side by side in memory",
            f"heads {by_head} elements apart, as where a page holds one head after the other: no "
            "kernel reads that",
        )
    if pages > 1 and page_size > 1 and by_page != page_size * by_token:
        raise refused(
            name,
            "have its pages one behind the other in memory",
            f"pages of {page_size * by_token} elements {by_page} apart, as where K and V of a page "
            "alternate",
        )
    return cache[:, 0] if page_size == 1 else cache.view(pages * page_size, *cache.shape[2:])


def run_tensors(
    q, k_cache, v_cache, out, heads: HeadConfig, dtypes, device, batch: int, largest_slot: int
) -> None:
    """Check run()'s tensors against the plan; caches [slots, Hkv, D], out None or a tensor, dtypes
    those of queries and of caches."""
    for name, given, rows, num_heads, dtype in (
        ("q", q, batch, heads.num_qo_heads, dtypes[0]),
        ("kv_cache[0]", k_cache, "slots", heads.num_kv_heads, dtypes[1]),
        ("kv_cache[1]", v_cache, "slots", heads.num_kv_heads, dtypes[1]),
        ("out", out, batch, heads.num_qo_heads, dtypes[0]),
    ):
        if name == "out" and given is None:
            continue
        tensor(name, given)
        shape = tuple(given.shape)
        if shape[1:] != (num_heads, heads.head_dim) or rows not in ("slots", shape[0]):
            raise refused(name, f"have shape ({rows}, {num_heads}, {heads.head_dim})", shape)
        if rows == "slots" and shape[0] <= largest_slot:
            must = f"have slot {largest_slot}, which the plan reads"
            raise refused(name, must, f"{shape[0]} slots")
        if given.dtype != dtype:
            whose = "kv_dtype" if rows == "slots" else "dtype"
            raise refused(name, f"have the wrapper's {whose}, {dtype}", given.dtype)
        if given.device != device:
            raise refused(name, f"be on the wrapper's device, {device}", given.device)
        if given.stride(-1) != 1 or (num_heads > 1 and given.stride(-2) != heads.head_dim):
            must = "be contiguous in its last two dimensions"
            raise refused(name, must, f"strides {given.stride()}")
        if name == "out" and batch > 1 and given.stride(0) < num_heads * heads.head_dim:
            raise refused(name, "have rows that do not overlap", f"strides {given.stride()}")
    if out is not None:
        # kernels may read any of these again behind the first outputs
        for name, read in (("q", q), ("kv_cache[0]", k_cache), ("kv_cache[1]", v_cache)):
            if _overlap(out, read):
                raise refused("out", "have memory of its own", f"some of {name}'s")


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether rows [n, heads, head_dim], each dense, of two tensors have bytes in common;
    rows of different strides have where one begins before the other ends."""
    if not (one.numel() and other.numel()):
        return False
    begin, end = one.data_ptr(), one.data_ptr() + _bytes_to_end(one)
    if other.data_ptr() >= end or begin >= other.data_ptr() + _bytes_to_end(other):
        return False
    steps = {x.stride(0) * x.element_size() for x in (one, other) if x.shape[0] > 1}
    if len(steps) != 1 or 0 in steps:
        return True
    step = steps.pop()
    apart = (other.data_ptr() - begin) % step
    return apart < one[0].nbytes or apart + other[0].nbytes > step


def _bytes_to_end(rows: torch.Tensor) -> int:
    return (rows.shape[0] - 1) * rows.stride(0) * rows.element_size() + rows[0].nbytes


def head_sinks(sinks, num_qo_heads: int, device: torch.device) -> None:
    """Check run()'s sinks: None, or a float32 tensor with one logit for each query head."""
    if sinks is None:
        return
    tensor("sinks", sinks)
    if tuple(sinks.shape) != (num_qo_heads,):
        raise refused("sinks", f"have shape ({num_qo_heads},)", tuple(sinks.shape))
    if sinks.dtype != torch.float32:
        raise refused("sinks", "be float32 (convert a model's once, not in each step)", sinks.dtype)
    if sinks.device != device:
        raise refused("sinks", f"be on the wrapper's device, {device}", sinks.device)
    if not sinks.is_contiguous():
        raise refused("sinks", "be contiguous", f"strides {sinks.stride()}")


def aligned_rows(q, k_cache, v_cache, out) -> None:
    """Check that rows begin at multiples of 16 bytes: kernels copy as many a thread."""
    names = ("q", "kv_cache[0]", "kv_cache[1]", "out")
    for name, rows in zip(names, (q, k_cache, v_cache, out), strict=True):
        step = rows.stride(0) * rows.element_size()
        if rows.data_ptr() % 16 or step % 16:
            must = "have rows that begin at multiples of 16 bytes, as the kernels need it"
            raise refused(name, must, f"{rows.data_ptr():#x} and every {step} bytes")
