"""Log-sum-exp values that say their base: FlashInfer's and ours is 2, SGLang's Triton merge expects
e, and mixing them corrupts outputs silently."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Lse:
    """values float32 [B, num_qo_heads] in units of log_base."""

    values: torch.Tensor
    base: str = "2"
