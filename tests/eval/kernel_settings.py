"""A comparison small enough for a CPU."""

import torch

from eval.bench_kernel.case import DTYPE
from eval.bench_kernel.compare_providers import Setting
from eval.bench_kernel.floor import Rates
from eval.bench_kernel.trees import Tree
from sgl_prefix_attn.records import HeadConfig

CPU = torch.device("cpu")
HEADS = HeadConfig(4, 2, 32)
H100 = Rates(3.0e12, 600e12, "test")


def setting_of(tree: str, page_size: int = 1, kv_dtype: torch.dtype = DTYPE) -> Setting:
    return Setting(Tree.parse(tree), HEADS, page_size, CPU, 3, kv_dtype)
