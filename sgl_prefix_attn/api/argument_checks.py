"""Argument checks of the library API: each raises ValueError naming the argument and the row."""

import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from sgl_prefix_attn.records import Forest, HeadConfig, PathTable

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def torch_device(device: torch.device | str) -> torch.device:
    """Return the device, a CPU or a CUDA one."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be a CPU or a CUDA GPU, got {str(device)!r}")
    return found


def number(name: str, value: Any) -> float:
    """Return a finite number as float."""
    try:
        found = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return found


def wrapper_arguments(head_dim, page_size, device, dtype, logits_soft_cap) -> None:
    if not 16 <= head_dim <= 256:
        raise ValueError(f"head_dim must be between 16 and 256, got {head_dim}")
    if type(page_size) is not int or page_size < 1:  # True is an int, too
        raise ValueError(f"page_size must be an integer >= 1, got {page_size!r}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}; got {dtype}")
    if dtype == torch.float32 and device.type == "cuda":
        raise ValueError("dtype must be float16 or bfloat16 on a GPU, got float32")
    if logits_soft_cap < 0:
        raise ValueError(f"logits_soft_cap must be >= 0 (0: none), got {logits_soft_cap!r}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        gpus = f"cuda:0 to cuda:{count - 1}" if count else "no CUDA GPU"
        raise ValueError(
            f"device is {str(device)!r}, but torch {torch.__version__} sees {gpus}; a CPU is 'cpu'"
        )


def lengths(seq_lens: torch.Tensor | Sequence[int]) -> np.ndarray:
    """Return seq_lens as int32 [B], each at least 1 and within int32."""
    array = _integers("seq_lens", seq_lens)
    if array.size == 0:
        raise ValueError("seq_lens is empty: a step needs at least one request")
    most = np.iinfo(np.int32).max
    if (row := _first((array < 1) | (array > most))) is not None:
        raise ValueError(f"seq_lens[{row}] is {array[row]}, must be 1 to {most}")
    return array.astype(np.int32)


def query_lens(lens: torch.Tensor | Sequence[int] | None, seq_lens: np.ndarray) -> np.ndarray:
    """Return query_lens as int32 [B], each at least 1 and at most its seq_len; None: 1 each."""
    if lens is None:
        return np.ones(seq_lens.size, np.int32)
    array = _integers("query_lens", lens)
    if array.size != seq_lens.size:
        raise ValueError(f"query_lens has {array.size} rows, seq_lens {seq_lens.size}")
    if (row := _first((array < 1) | (array > seq_lens))) is not None:
        raise ValueError(
            f"query_lens[{row}] is {array[row]}, must be 1 to seq_lens[{row}], {seq_lens[row]}"
        )
    return array.astype(np.int32)


def path_table(paths: Sequence[Sequence[tuple[int, int]]], seq_lens: np.ndarray) -> PathTable:
    """Paths as a node table; the same node_id must have one length and one parent everywhere."""
    try:
        rows = len(paths)
    except TypeError:
        raise ValueError(
            f"paths must be a sequence, a path for each request, got {paths!r}"
        ) from None
    if rows != seq_lens.size:
        raise ValueError(f"paths has {rows} rows, seq_lens {seq_lens.size}")
    index: dict[int, int] = {}
    parent: list[int] = []
    length: list[int] = []
    leaf = np.full(seq_lens.size, -1, np.int32)
    for row, path in enumerate(paths):
        above, total = -1, 0
        for node, tokens in _pairs(row, path):
            if tokens < 1:
                raise ValueError(f"paths[{row}]: node {node} has length {tokens}, must be >= 1")
            here = index.get(node)
            if here is None:
                if not -(1 << 63) <= node < 1 << 63:
                    raise ValueError(f"paths[{row}]: node {node} does not fit int64")
                here = index[node] = len(parent)
                parent.append(above)
                length.append(tokens)
            elif length[here] != tokens or parent[here] != above:
                raise ValueError(
                    f"paths[{row}] contradicts an earlier row: node {node} has length {tokens} "
                    f"(before: {length[here]}) or another node above it"
                )
            above = here
            total += tokens
        if total >= seq_lens[row]:
            raise ValueError(
                f"paths[{row}] holds {total} tokens but seq_lens[{row}] is {seq_lens[row]}: a path "
                "must be shorter than its request, whose newest token is private"
            )
        leaf[row] = above
    return PathTable.of(parent, length, leaf, seq_lens, node_id=list(index))


def _pairs(row: int, path) -> Iterator[tuple[int, int]]:
    entry = path
    try:
        for entry in path:
            node, tokens = map(operator.index, entry)
            yield node, tokens
    except (TypeError, ValueError):
        raise ValueError(
            f"paths[{row}] must hold pairs of integers (node_id, length), got {entry!r}"
        ) from None


def pool_indices(req_pool_indices, seq_lens: np.ndarray, req_to_token: torch.Tensor):
    """Return req_pool_indices as int64 [B], rows of req_to_token that are long enough."""
    rows = _integers("req_pool_indices", req_pool_indices)
    _slot_table("req_to_token", req_to_token, seq_lens)
    if rows.size != seq_lens.size:
        raise ValueError(f"req_pool_indices has {rows.size} rows, seq_lens {seq_lens.size}")
    there = req_to_token.shape[0]
    if (row := _first((rows < 0) | (rows >= there))) is not None:
        raise ValueError(f"req_pool_indices[{row}] is {rows[row]}, req_to_token has {there} rows")
    return torch.from_numpy(rows)


def block_table(table: torch.Tensor, seq_lens: np.ndarray, page_size: int) -> None:
    _slot_table("block_table", table, seq_lens, page_size)
    if table.shape[0] != seq_lens.size:
        raise ValueError(f"block_table has {table.shape[0]} rows, seq_lens {seq_lens.size}")


def max_slot(name: str, table: torch.Tensor, pool: torch.Tensor, seq_lens: np.ndarray) -> int:
    """Return the largest slot in use. Raises for a negative one, naming the argument `name`."""
    inside = _columns_below(seq_lens, table.device)
    rows = table[pool.to(table.device), : inside.shape[1]]
    used = torch.where(inside, rows, 0)
    if (row := _first((used < 0).any(dim=1))) is not None:
        raise ValueError(f"{name}: row of request {row} holds a negative slot")
    return int(used.max())


def slots_agree(forest: Forest, req_to_token: torch.Tensor, pool: torch.Tensor) -> None:
    """Check that requests of one shared node have the same slots there.

    Every request is compared with the first one of its deepest shared node, and those first ones
    with their parent node's: all pairs agree if these do. One look at the device for all.
    """
    batch = forest.tail_parent.size
    sharing = np.flatnonzero(forest.tail_parent >= 0)
    first = np.full(forest.parent.size, batch)  # first request below each node
    np.minimum.at(first, forest.tail_parent[sharing], sharing)
    for node, parent in reversed(list(enumerate(forest.parent))):
        if parent >= 0:
            first[parent] = min(first[parent], first[node])
    above = np.concatenate([forest.tail_parent, forest.parent])  # requests, then nodes
    rows = np.concatenate([np.arange(batch), first])[above >= 0]
    above = above[above >= 0]
    others, ends = first[above], forest.end[above]
    if not rows.size:
        return
    shared = _columns_below(ends, req_to_token.device)
    table = req_to_token[:, : shared.shape[1]]
    pool = pool.to(table.device)
    differ = (table[pool[rows]] != table[pool[others]]) & shared
    if (pair := _first(differ.any(dim=1))) is not None:
        raise ValueError(
            f"paths[{rows[pair]}] shares KV positions 0 to {ends[pair]} with request "
            f"{others[pair]}, but their slots in req_to_token differ"
        )


def append_slots(out_cache_loc: torch.Tensor, batch: int) -> int:
    """Return the largest new slot, -1 on a GPU: looking at values there would synchronise."""
    _tensor("out_cache_loc", out_cache_loc)
    if (shape := tuple(out_cache_loc.shape)) != (batch,):
        raise ValueError(f"out_cache_loc must have shape ({batch},), got {shape}")
    if out_cache_loc.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"out_cache_loc must be int32 or int64, got {out_cache_loc.dtype}")
    if out_cache_loc.device.type != "cpu":
        return -1
    if (row := _first(out_cache_loc < 0)) is not None:
        raise ValueError(f"out_cache_loc[{row}] is {out_cache_loc[row]}, a negative slot")
    return int(out_cache_loc.max())


def run_tensors(q, kv_cache, out, heads: HeadConfig, dtype, device, batch: int, largest_slot: int):
    """Check run()'s tensors against the plan; returns (k_cache, v_cache)."""
    try:
        k_cache, v_cache = kv_cache
    except (TypeError, ValueError):
        raise ValueError("kv_cache must be a pair (k, v)") from None
    for name, tensor, rows, num_heads in (
        ("q", q, batch, heads.num_qo_heads),
        ("kv_cache[0]", k_cache, "slots", heads.num_kv_heads),
        ("kv_cache[1]", v_cache, "slots", heads.num_kv_heads),
        ("out", out, batch, heads.num_qo_heads),
    ):
        if name == "out" and tensor is None:
            continue
        _tensor(name, tensor)
        shape = tuple(tensor.shape)
        if shape[1:] != (num_heads, heads.head_dim) or rows not in ("slots", shape[0]):
            wanted = f"({rows}, {num_heads}, {heads.head_dim})"
            raise ValueError(f"{name} must have shape {wanted}, got {shape}")
        if rows == "slots" and shape[0] <= largest_slot:
            raise ValueError(f"{name} has {shape[0]} slots but the plan reads slot {largest_slot}")
        if tensor.dtype != dtype:
            raise ValueError(f"{name} has dtype {tensor.dtype}, the wrapper was made for {dtype}")
        if tensor.device.type != device.type:
            raise ValueError(f"{name} is on {tensor.device}, the wrapper on {device}")
        if tensor.stride(-1) != 1 or tensor.stride(-2) != heads.head_dim:
            raise ValueError(f"{name} must be contiguous in its last two dimensions")
    return k_cache, v_cache


def aligned_rows(**tensors) -> None:
    """Row tiles copy 16 bytes a thread: rows of these tensors must begin at multiples of them."""
    for name, tensor in tensors.items():
        if tensor.data_ptr() % 16 or tensor.stride(0) * tensor.element_size() % 16:
            raise ValueError(
                f"{name} must have rows that begin at multiples of 16 bytes, as row tiles need it"
            )


def _first(bad: np.ndarray | torch.Tensor) -> int | None:
    """Return the first row that is bad, or None."""
    rows = np.flatnonzero(bad.cpu() if isinstance(bad, torch.Tensor) else bad)
    return int(rows[0]) if rows.size else None


def _columns_below(ends: np.ndarray, device) -> torch.Tensor:
    """Return bool [rows, longest]: the columns below each row's end."""
    columns = torch.arange(int(ends.max()), device=device)
    return columns < torch.from_numpy(ends).to(device)[:, None]


def _tensor(name: str, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(value).__name__}")


def _integers(name: str, values: torch.Tensor | Sequence[int]) -> np.ndarray:
    try:
        array = values.cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    except (TypeError, ValueError, RuntimeError):  # no dtype of numpy's, rows of several lengths
        raise ValueError(f"{name} must be one-dimensional integers") from None
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"{name} must be one-dimensional integers")
    return array.astype(np.int64)


def _slot_table(name: str, table: torch.Tensor, seq_lens: np.ndarray, page_size: int = 1) -> None:
    _tensor(name, table)
    if table.ndim != 2 or table.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} must be a two-dimensional int32 or int64 tensor")
    holds = table.shape[1] * page_size
    if (row := _first(seq_lens > holds)) is not None:
        raise ValueError(
            f"seq_lens[{row}] is {seq_lens[row]} but {name} holds {holds} tokens per row"
        )
