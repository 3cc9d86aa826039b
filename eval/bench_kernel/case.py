"""One benchmark case on the device: tree, heads, page size, queries and several KV pools."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from eval.bench_kernel.floor import kv_bytes
from eval.bench_kernel.trees import Tree, build_tables
from sgl_prefix_attn.records import HeadConfig

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# A graph cycles through this much KV, so that no layer finds its own in the L2 cache (50 MB).
_POOL_BYTES = 400e6


@dataclass(frozen=True)
class Case:
    """Input of every provider; layer i reads k[i] and v[i].

    node_slots   per level int32 [nodes, length], on the device
    req_to_token int32 [B, seq_len], on the device
    seq_lens     int32 [B], on the device; all requests are equally long
    q            [B, Hq, D]
    k, v         one [slots, Hkv, D] per layer; slots that no request owns hold NaN
    """

    tree: Tree
    heads: HeadConfig
    page_size: int
    dtype: torch.dtype
    device: torch.device
    node_slots: tuple[torch.Tensor, ...]
    req_to_token: torch.Tensor
    seq_lens: torch.Tensor
    q: torch.Tensor
    k: tuple[torch.Tensor, ...]
    v: tuple[torch.Tensor, ...]

    @property
    def num_layers(self) -> int:
        return len(self.k)

    @property
    def head_sizes(self) -> tuple[int, int, int]:
        """Query heads, KV heads, head dim: in the order in which every library takes them."""
        return self.heads.num_qo_heads, self.heads.num_kv_heads, self.heads.head_dim

    @property
    def sm_scale(self) -> float:
        return self.heads.head_dim**-0.5

    def paged(self, cache: torch.Tensor) -> torch.Tensor:
        """View a pool as [pages, page_size, Hkv, D]."""
        return cache.view(-1, self.page_size, self.heads.num_kv_heads, self.heads.head_dim)

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """View a layer's pools as pages."""
        return self.paged(self.k[layer]), self.paged(self.v[layer])

    def pages(self, slots: torch.Tensor) -> torch.Tensor:
        """Return page ids int32 [..., pages] of rows of slots [..., tokens]."""
        return (slots[..., :: self.page_size] // self.page_size).contiguous()

    def last_page_len(self, length: int) -> int:
        return (length - 1) % self.page_size + 1

    def new_out(self) -> list[torch.Tensor]:
        """Make one output per layer, poisoned with NaN."""
        return [torch.full_like(self.q, float("nan")) for _ in range(self.num_layers)]


def num_pools(tree: Tree, heads: HeadConfig, itemsize: int) -> int:
    """Return at least two: a kernel that reads the KV of another layer must not go unnoticed."""
    return max(2, min(12, int(_POOL_BYTES // kv_bytes(tree, heads, itemsize)) + 1))


def build_case(
    tree: Tree,
    heads: HeadConfig,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    layout: str = "permuted",
) -> Case:
    """Draw queries and pools at random; the same arguments, the same case on one kind of device.

    Raises ValueError when the tree does not fit the page size.
    """
    tables = build_tables(tree, page_size, np.random.default_rng(seed), layout)
    generator = torch.Generator(device).manual_seed(seed)
    unused = np.setdiff1d(np.arange(tables.num_slots), tables.req_to_token)
    unused = torch.from_numpy(unused).to(device)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    def pools() -> tuple[torch.Tensor, ...]:
        shape = (tables.num_slots, heads.num_kv_heads, heads.head_dim)
        return tuple(
            random(*shape).index_fill_(0, unused, float("nan"))
            for _ in range(num_pools(tree, heads, dtype.itemsize))
        )

    return Case(
        tree=tree,
        heads=heads,
        page_size=page_size,
        dtype=dtype,
        device=device,
        node_slots=tuple(torch.from_numpy(slots).to(device) for slots in tables.node_slots),
        req_to_token=torch.from_numpy(tables.req_to_token).to(device),
        seq_lens=torch.full((tree.batch_size,), tree.seq_len, dtype=torch.int32, device=device),
        q=random(tree.batch_size, heads.num_qo_heads, heads.head_dim),
        k=pools(),
        v=pools(),
    )
