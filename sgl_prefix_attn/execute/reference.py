"""The plan's words run in torch: the CPU engine's executor and the oracle of every kernel.

Each function does what the kernel of the same name does, reading nothing but the words, so that a
plan which is wrong is wrong here too. `full_attention` is the ground truth: it knows no plan.
"""

import math

import torch

from sgl_prefix_attn.execute.lse import Lse
from sgl_prefix_attn.kernels import layout as L


def fill_segments(
    words: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    kv_indices: torch.Tensor,
) -> None:
    """Copy every segment's slots once: req_to_token [R, C] rows -> kv_indices int32 [entries]."""
    first = words[L.H_SEGMENTS].item()
    for w in range(int(words[L.H_NUM_SEGMENTS])):
        segment = words[first + w * L.SEGMENT_WORDS :][: L.SEGMENT_WORDS].tolist()
        row = req_to_token[req_pool_indices[segment[L.S_ROW]]]
        start, length = segment[L.S_START], segment[L.S_LEN]
        kv_indices[segment[L.S_DST] :][:length] = row[start : start + length].to(kv_indices.dtype)


def append(
    words: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    kv_indices: torch.Tensor,
) -> None:
    """Write each request's newest slot at the end of its tail; idempotent. Rows above the plan's
    batch are padding and are left alone. seq_lens, out_cache_loc [>= B]."""
    batch = int(words[L.H_BATCH])
    tails = words[words[L.H_TAILS].item() :][: batch * L.TAIL_WORDS].view(batch, L.TAIL_WORDS)
    where = tails[:, L.T_DST] + seq_lens[:batch] - 1 - tails[:, L.T_START]
    kv_indices[where.long()] = out_cache_loc[:batch].to(kv_indices.dtype)


def execute(
    words: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    sm_scale: float,
    logits_soft_cap: float = 0.0,
) -> tuple[torch.Tensor, Lse]:
    """Run the queue item by item, then merge. q [B, Hq, D], caches [slots, Hkv, D].

    Returns out [B, Hq, D] in q's dtype and the LSE in base 2. Rows that no item writes stay NaN.
    """
    batch = int(words[L.H_BATCH])
    merges = _merge_entries(words)
    num_partials = max((entry[L.M_PARTIAL] + entry[L.M_COUNT] for entry in merges), default=0)
    _, num_qo_heads, head_dim = q.shape
    out = torch.full((batch, num_qo_heads, head_dim), math.nan, dtype=torch.float32)
    lse = torch.full((batch, num_qo_heads), math.nan, dtype=torch.float32)
    partial_out = torch.full((num_partials, num_qo_heads, head_dim), math.nan)
    partial_lse = torch.full((num_partials, num_qo_heads), math.nan)
    for item in _items(words):
        for rows, partials, entries in _decode(item, words, seq_lens):
            index = kv_indices[entries].long()
            o, lse2 = _attend(q[rows], k_cache[index], v_cache[index], sm_scale, logits_soft_cap)
            if partials[0] < 0:
                out[rows], lse[rows] = o, lse2
            else:
                partial_out[partials], partial_lse[partials] = o, lse2
    _merge(merges, partial_out, partial_lse, out, lse)
    return out.to(q.dtype), Lse(lse)


def full_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    sm_scale: float,
    logits_soft_cap: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, Lse]:
    """Attend every request over its own row of slots, in `dtype`; knows nothing of plans."""
    outs, lses = [], []
    for i, length in enumerate(seq_lens.tolist()):
        index = req_to_token[req_pool_indices[i], :length].long()
        o, lse2 = _attend(
            q[i : i + 1], k_cache[index], v_cache[index], sm_scale, logits_soft_cap, dtype
        )
        outs.append(o)
        lses.append(lse2)
    return torch.cat(outs), Lse(torch.cat(lses))


def _items(words: torch.Tensor):
    for tile in range(L.MAX_TILES):
        first, count = words[L.H_QUEUES + 2 * tile :][:2].tolist()
        yield from words[first:][: count * L.ITEM_WORDS].view(count, L.ITEM_WORDS).tolist()


def _decode(item: list[int], words: torch.Tensor, seq_lens: torch.Tensor):
    """Yield output rows, partial rows and entries of kv_indices of each stretch of an item."""
    first = words[L.H_ENTRIES].item() + item[L.I_ENTRY] * L.ENTRY_WORDS
    entries = words[first:][: item[L.I_NUM_QUERIES] * L.ENTRY_WORDS].view(-1, L.ENTRY_WORDS).long()
    rows, partials = entries[:, L.E_ROW], entries[:, L.E_PARTIAL]
    partials = torch.where(partials < 0, partials, partials + item[L.I_SPLIT])
    if item[L.I_LEN] != L.GROWS:
        yield rows, partials, _stretch(item, item[L.I_SEGMENT], item[L.I_LEN])
        return
    for i, row in enumerate(rows.tolist()):
        tail = words[words[L.H_TAILS].item() + row * L.TAIL_WORDS :][: L.TAIL_WORDS].tolist()
        length = seq_lens[row].item() - tail[L.T_START]
        yield rows[i : i + 1], partials[i : i + 1], _stretch(item, tail[L.T_DST], length)


def _stretch(item: list[int], segment: int, length: int) -> slice:
    """Entries of kv_indices that this item's split covers of a segment `length` tokens long."""
    begin, end = L.split_range(length, item[L.I_SPLIT], item[L.I_NUM_SPLITS])
    return slice(segment + begin, segment + end)


def _attend(q, k, v, sm_scale, logits_soft_cap, dtype=torch.float32):
    """Attend q [n, Hq, D] over k, v [t, Hkv, D]: out [n, Hq, D] and LSE [n, Hq] in base 2."""
    n, num_qo_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    grouped = q.to(dtype).view(n, num_kv_heads, -1, head_dim)
    logits = torch.einsum("nhgd,thd->nhgt", grouped, k.to(dtype)) * sm_scale
    if logits_soft_cap > 0:
        logits = logits_soft_cap * torch.tanh(logits / logits_soft_cap)
    lse = torch.logsumexp(logits, dim=-1)
    out = torch.einsum("nhgt,thd->nhgd", torch.exp(logits - lse[..., None]), v.to(dtype))
    return out.reshape(n, num_qo_heads, head_dim), lse.view(n, num_qo_heads) / math.log(2)


def _merge_entries(words: torch.Tensor) -> list[list[int]]:
    first, count = int(words[L.H_MERGES]), int(words[L.H_NUM_MERGES])
    return words[first:][: count * L.MERGE_WORDS].view(count, L.MERGE_WORDS).tolist()


def _merge(merges, partial_out, partial_lse, out, lse) -> None:
    for entry in merges:
        parts = slice(entry[L.M_PARTIAL], entry[L.M_PARTIAL] + entry[L.M_COUNT])
        total = torch.logsumexp(partial_lse[parts] * math.log(2), dim=0)
        weight = torch.exp(partial_lse[parts] * math.log(2) - total)
        out[entry[L.M_ROW]] = (weight[..., None] * partial_out[parts]).sum(0)
        lse[entry[L.M_ROW]] = total / math.log(2)
