"""Attention sinks that matter: near the scores, far above and far below them."""

import torch

from sgl_prefix_attn.records import HeadConfig

# of the first heads; 150 is beyond float32 as a power of e
_FIRST = (2.5, 30.0, -30.0, 150.0)


def sinks_of(heads: HeadConfig, device="cpu") -> torch.Tensor:
    """Float32 [Hq]: no two are alike."""
    sinks = torch.randn(heads.num_qo_heads, generator=torch.Generator().manual_seed(2)) * 2 + 3
    count = min(len(_FIRST), heads.num_qo_heads)
    sinks[:count] = torch.tensor(_FIRST[:count])
    return sinks.to(device)
