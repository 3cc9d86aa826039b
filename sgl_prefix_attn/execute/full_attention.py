"""Attention of each request over its own slots: the ground truth, which knows no plan."""

import math

import torch

from sgl_prefix_attn.execute.lse import Lse


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
    sinks: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, Lse]:
    """Attend every request over its own row of slots.

    In a half precision `dtype` it computes as tensor cores do: in float32, with probabilities and
    results rounded to `dtype`. sinks [Hq] are one more logit of each head, behind the cap and
    without a value. Keys and values of any dtype are multiplied by their scales first; values may
    have another dim than keys. Returns out in `dtype` and the LSE in base 2, sinks included.
    """
    outs, lses = [], []
    exact = torch.promote_types(dtype, torch.float32)
    _, num_qo_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    for i, length in enumerate(seq_lens.tolist()):
        index = req_to_token[req_pool_indices[i], :length].long()
        k, v = k_cache[index].to(exact) * k_scale, v_cache[index].to(exact) * v_scale
        grouped = q[i].to(exact).view(num_kv_heads, -1, head_dim)
        logits = torch.einsum("hgd,thd->hgt", grouped, k) * sm_scale
        if logits_soft_cap > 0:
            logits = logits_soft_cap * torch.tanh(logits / logits_soft_cap)
        if sinks is not None:
            last = sinks.to(exact).view(num_kv_heads, -1, 1)
            logits = torch.cat([logits, last], -1)
        lse = torch.logsumexp(logits, dim=-1)
        weights = torch.exp(logits[..., :length] - lse[..., None]).to(dtype).to(exact)
        out = torch.einsum("hgt,thd->hgd", weights, v).to(dtype)
        outs.append(out.reshape(num_qo_heads, -1))
        lses.append(lse.view(num_qo_heads) / math.log(2))
    return torch.stack(outs), Lse(torch.stack(lses))
