"""Argument checks of the library API: each raises ValueError naming the argument and the row."""

import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from sgl_prefix_attn.execute.backends.kernel_backend import NARROW_KV
from sgl_prefix_attn.records import Forest, PathTable

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MOST_TOKENS = np.iinfo(np.int32).max


def refused(name: str, must: str, got: Any) -> ValueError:
    """Return the error of an argument: all checks word theirs so."""
    return ValueError(f"{name} must {must}, got {got}")


def tensor(name: str, value: Any) -> None:
    """Check that an argument is a tensor."""
    if not isinstance(value, torch.Tensor):
        raise refused(name, "be a tensor", type(value).__name__)


def layer_arguments(
    head_dim, page_size, device, dtype, sm_scale, logits_soft_cap
) -> tuple[torch.device, float, float]:
    """Return device, sm_scale (None: head_dim ** -0.5) and logits_soft_cap."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise refused("device", "be a CPU or a CUDA GPU", repr(str(device)))
    scale = head_dim**-0.5 if sm_scale is None else _positive("sm_scale", sm_scale)
    soft_cap = _number("logits_soft_cap", logits_soft_cap)
    if soft_cap < 0:
        raise refused("logits_soft_cap", "be >= 0 (0: none)", soft_cap)
    if not 16 <= head_dim <= 256:
        raise refused("head_dim", "be 16 to 256", head_dim)
    if type(page_size) is not int or page_size < 1:  # True is an int, too
        raise refused("page_size", "be an integer >= 1", repr(page_size))
    if dtype not in DTYPES:
        raise refused("dtype", f"be one of {', '.join(map(str, DTYPES))}", dtype)
    if dtype == torch.float32 and found.type == "cuda":
        raise refused("dtype", "be float16 or bfloat16 on a GPU", dtype)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found.type == "cuda" and (found.index or 0) >= count:
        there = f"cuda:0 to cuda:{count - 1}" if count else "no CUDA GPU"
        must = f"be 'cpu' or what torch {torch.__version__} sees, {there}"
        raise refused("device", must, repr(str(found)))
    if found.type == "cpu":
        found = torch.device("cpu")  # as tensors on any "cpu:N" name it
    elif found.index is None:
        found = torch.device("cuda", torch.cuda.current_device())
    return found, scale, soft_cap


def kv_dtype(kv_dtype: torch.dtype, dtype: torch.dtype) -> None:
    if kv_dtype not in (dtype, NARROW_KV):
        raise refused("kv_dtype", f"be {NARROW_KV}, or None for {dtype}", kv_dtype)


def kv_scales(k_scale: float, v_scale: float, narrow: bool) -> tuple[float, float]:
    """Return run()'s scales; narrow: its caches are of another dtype than its queries."""
    scales = _positive("k_scale", k_scale), _number("v_scale", v_scale)
    for name, scale in zip(("k_scale", "v_scale"), scales, strict=True):
        if scale != 1.0 and not narrow:
            raise refused(name, "be 1 for caches of the wrapper's dtype", scale)
    return scales


def _number(name: str, value: Any) -> float:
    try:
        found = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        raise refused(name, "be a finite number", repr(value))
    return found


def _positive(name: str, value: Any) -> float:
    """Return a factor of logits, which some kernels apply to masked ones, too: -inf stays so."""
    found = _number(name, value)
    if found <= 0:
        raise refused(name, "be positive", found)
    return found


def lengths(seq_lens: torch.Tensor | Sequence[int]) -> np.ndarray:
    """Return seq_lens as int32 [B], each at least 1 and within int32."""
    array = _one_each("seq_lens", seq_lens, 1, _MOST_TOKENS)
    if not array.size:
        raise refused("seq_lens", "hold at least one request", "none")
    return array.astype(np.int32)


def query_lens(
    lens: torch.Tensor | Sequence[int] | None, seq_lens: np.ndarray
) -> np.ndarray | None:
    """Return query_lens as int32 [B], each at least 1 and at most its seq_len; None as it is."""
    if lens is None:
        return None
    return _one_each("query_lens", lens, 1, seq_lens, seq_lens.size).astype(np.int32)


def pool_indices(req_pool_indices, seq_lens: np.ndarray, req_to_token: torch.Tensor):
    """Return req_pool_indices as int64 [B], rows of req_to_token that are long enough."""
    _slot_table("req_to_token", req_to_token, seq_lens)
    last = req_to_token.shape[0] - 1
    rows = _one_each("req_pool_indices", req_pool_indices, 0, last, seq_lens.size)
    return torch.from_numpy(rows.astype(np.int64))


def block_table(table: torch.Tensor, seq_lens: np.ndarray, page_size: int) -> None:
    """Check a table of pages [B, pages] that are long enough."""
    _slot_table("block_table", table, seq_lens, page_size)
    _rows("block_table", table.shape[0], seq_lens.size)


def path_table(
    paths: Sequence[Sequence[tuple[int, int]]],
    seq_lens: np.ndarray,
    query_lens: np.ndarray | None = None,
) -> PathTable:
    """Return paths as a node table: the same node_id has one length and one parent everywhere, and
    no path holds one of its request's query_lens (None: one) newest tokens."""
    try:
        rows = len(paths)
    except TypeError:
        raise refused("paths", "be a sequence, a path for each request", repr(paths)) from None
    _rows("paths", rows, seq_lens.size)
    index: dict[int, int] = {}
    parent: list[int] = []
    length: list[int] = []
    leaf = np.full(seq_lens.size, -1, np.int32)
    room = (seq_lens - (1 if query_lens is None else query_lens)).tolist()
    for row, path in enumerate(paths):
        above, total = -1, 0
        mine: set[int] = set()
        for node, tokens in _pairs(row, path):
            if tokens < 1:
                raise refused(f"paths[{row}]", "hold nodes of length >= 1", f"{node}: {tokens}")
            if node in mine:
                raise refused(f"paths[{row}]", "go down a tree", f"node {node} twice")
            mine.add(node)
            here = index.get(node)
            if here is None:
                if not -(1 << 63) <= node < 1 << 63:
                    raise refused(f"paths[{row}]", "hold nodes that fit int64", node)
                here = index[node] = len(parent)
                parent.append(above)
                length.append(tokens)
            elif length[here] != tokens or parent[here] != above:
                must = f"have node {node} as rows before it, {length[here]} long and where it was"
                raise refused(f"paths[{row}]", must, f"length {tokens} or another node above it")
            above = here
            total += tokens
        if total > room[row]:
            must = f"hold at most {room[row]} of the {seq_lens[row]} tokens in seq_lens[{row}]"
            raise refused(f"paths[{row}]", f"{must}, as the newest attend", total)
        leaf[row] = above
    return PathTable.of(parent, length, leaf, seq_lens, node_id=list(index))


def _pairs(row: int, path) -> Iterator[tuple[int, int]]:
    entry = path
    try:
        for entry in path:
            node, tokens = map(operator.index, entry)
            yield node, tokens
    except (TypeError, ValueError):
        must = "hold pairs of integers (node_id, length)"
        raise refused(f"paths[{row}]", must, repr(entry)) from None


def max_slot(name: str, table: torch.Tensor, pool: torch.Tensor, seq_lens: np.ndarray) -> int:
    """Return the largest slot in use. Raises for a negative one, and for one that is no int32,
    naming the argument `name`."""
    inside = _columns_below(seq_lens, table.device)
    rows = table[pool.to(table.device), : inside.shape[1]]
    used = torch.where(inside, rows, 0)
    if (row := _first((used < 0).any(dim=1))) is not None:
        raise refused(name, "hold no negative slots", f"one in the row of request {row}")
    if (largest := int(used.max())) > _MOST_TOKENS:
        raise refused(name, f"hold slots up to {_MOST_TOKENS}", largest)
    return largest


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
        must = f"share with request {others[pair]} KV positions whose slots in req_to_token agree"
        raise refused(f"paths[{rows[pair]}]", must, f"0 to {ends[pair]}, where they differ")


def append_slots(out_cache_loc: torch.Tensor, batch: int) -> int:
    """Return the largest new slot, -1 on a GPU: looking at values there would synchronise."""
    tensor("out_cache_loc", out_cache_loc)
    if (shape := tuple(out_cache_loc.shape)) != (batch,):
        raise refused("out_cache_loc", f"have shape ({batch},)", shape)
    if out_cache_loc.dtype not in (torch.int32, torch.int64):
        raise refused("out_cache_loc", "be int32 or int64", out_cache_loc.dtype)
    if out_cache_loc.device.type != "cpu":
        return -1
    return int(_one_each("out_cache_loc", out_cache_loc, 0, _MOST_TOKENS).max())


def _first(bad: np.ndarray | torch.Tensor) -> int | None:
    """Return the first row that is bad, or None."""
    rows = np.flatnonzero(bad.cpu() if isinstance(bad, torch.Tensor) else bad)
    return int(rows[0]) if rows.size else None


def _columns_below(ends: np.ndarray, device) -> torch.Tensor:
    """Return bool [rows, longest]: the columns below each row's end."""
    columns = torch.arange(int(ends.max()), device=device)
    return columns < torch.from_numpy(ends).to(device)[:, None]


def _rows(name: str, rows: int, batch: int) -> None:
    if rows != batch:
        raise refused(name, f"have as many rows as seq_lens, {batch}", rows)


def _one_each(name: str, values, low: int, high, batch: int | None = None) -> np.ndarray:
    """Return an integer for each request, [B] from low to high; high may be [B] itself."""
    try:
        array = values.cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    except (TypeError, ValueError, RuntimeError):  # no dtype of numpy's, rows of several lengths
        array = None
    if array is None or array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        found = type(values).__name__ if array is None else f"{array.dtype} {array.shape}"
        raise refused(name, "be one-dimensional integers", found)
    if batch is not None:
        _rows(name, array.size, batch)
    if (row := _first((array < low) | (array > high))) is not None:
        most = np.broadcast_to(high, array.shape)[row]
        raise refused(f"{name}[{row}]", f"be {low} to {most}", array[row])
    return array


def _slot_table(name: str, table: torch.Tensor, seq_lens: np.ndarray, page_size: int = 1) -> None:
    tensor(name, table)
    if table.ndim != 2 or table.dtype not in (torch.int32, torch.int64):
        found = f"{table.dtype} {tuple(table.shape)}"
        raise refused(name, "be a two-dimensional int32 or int64 tensor", found)
    if table.layout != torch.strided or table.is_meta:
        raise refused(name, "be dense, on a CPU or a GPU", f"{table.layout} on {table.device}")
    holds = table.shape[1] * page_size
    if (row := _first(seq_lens > holds)) is not None:
        must = f"be at most {holds}, the tokens that a row of {name} holds"
        raise refused(f"seq_lens[{row}]", must, seq_lens[row])
