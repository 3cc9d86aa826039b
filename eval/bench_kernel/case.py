"""One benchmark case on the device: requests, heads, page size, queries and several KV pools."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from eval.bench_kernel.floor import kv_bytes
from eval.bench_kernel.trees import Tree, page_problem
from sgl_prefix_attn.records import HeadConfig, PathTable
from sgl_prefix_attn.tools.calibrate.measure import slots_of
from sgl_prefix_attn.tools.calibrate.stock_decode import StockBatch

DTYPE = torch.bfloat16  # what commands measure
# A graph cycles through this much KV, so that no layer finds its own in the L2 cache (50 MB): 64
# layers of the least that trees of one head have, 2 MB, are 130 MB.
_POOL_BYTES, _MOST_POOLS = 400e6, 64


@dataclass(frozen=True)
class Case:
    """Input of every provider; layer i reads k[i] and v[i].

    paths        what the requests share, and their lengths
    tokens       query tokens of each request, its last ones
    req_to_token int32 [B, longest], on the device; what lies behind a request's length is a slot
                 that holds NaN
    seq_lens     int32 [B], on the device
    q            [B * tokens, Hq, D] in dtype
    k, v         one [slots, Hkv, D] per layer, in dtype or narrower; slots that no request owns
                 hold NaN; of latent KV v is a view [slots, 1, Dv] of k
    tree         whose requests they are, all equally long; None: of no tree of levels
    """

    paths: PathTable
    tokens: int
    heads: HeadConfig
    page_size: int
    dtype: torch.dtype
    device: torch.device
    req_to_token: torch.Tensor
    seq_lens: torch.Tensor
    q: torch.Tensor
    k: tuple[torch.Tensor, ...]
    v: tuple[torch.Tensor, ...]
    tree: Tree | None = None

    @property
    def num_layers(self) -> int:
        return len(self.k)

    @property
    def kv_dtype(self) -> torch.dtype:
        return self.k[0].dtype

    @property
    def batch_size(self) -> int:
        return self.req_to_token.shape[0]

    @property
    def longest(self) -> int:
        """KV tokens of the longest request."""
        return self.req_to_token.shape[1]

    @property
    def query_lens(self) -> np.ndarray | None:
        """int32 [B], None where every request decodes one token."""
        return None if self.tokens == 1 else np.full(self.batch_size, self.tokens, np.int32)

    @property
    def head_sizes(self) -> tuple[int, int, int]:
        """Query heads, KV heads, head dim: in the order in which every library takes them."""
        return self.heads.num_qo_heads, self.heads.num_kv_heads, self.heads.head_dim

    @property
    def sm_scale(self) -> float:
        return self.heads.head_dim**-0.5

    @property
    def stock_batch(self) -> StockBatch:
        return StockBatch(
            self.heads, self.dtype, self.kv_dtype, self.page_size, self.seq_lens.cpu(),
            self.page_table,
        )  # fmt: skip

    @property
    def page_table(self) -> torch.Tensor:
        """A new int32 [B, pages]: page ids of the requests."""
        return self.pages(self.req_to_token)

    @property
    def starts(self) -> torch.Tensor:
        """int32 [B + 1], on the device: 0, 1, ..., B."""
        return torch.arange(self.batch_size + 1, dtype=torch.int32, device=self.device)

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """View a layer's pools as [pages, page_size, Hkv, D]."""
        k, v = (x[layer].unflatten(0, (-1, self.page_size)) for x in (self.k, self.v))
        return k, v

    def node_slots(self, level: int) -> torch.Tensor:
        """Return slots of the tree's nodes at a level, int32 [nodes, length], on the device."""
        first = torch.from_numpy(self.tree.first_requests(level)[:-1]).to(self.device)
        start = sum(self.tree.lengths[:level])
        return self.req_to_token[first, start : start + self.tree.lengths[level]]

    def pages(self, slots: torch.Tensor) -> torch.Tensor:
        """Return page ids int32 [..., pages] of rows of slots [..., tokens]."""
        return (slots[..., :: self.page_size] // self.page_size).contiguous()

    def last_page_len(self, length: int) -> int:
        return (length - 1) % self.page_size + 1

    def new_out(self) -> list[torch.Tensor]:
        """Make one output per layer, poisoned with NaN."""
        like = self.q[..., : self.heads.value_dim]
        return [torch.full_like(like, float("nan")) for _ in range(self.num_layers)]


def num_pools(unique_tokens: int, heads: HeadConfig, itemsize: int) -> int:
    """Return at least two: a kernel that reads the KV of another layer must not go unnoticed."""
    fill = int(_POOL_BYTES // kv_bytes(unique_tokens, heads, itemsize))
    return max(2, min(_MOST_POOLS, fill + 1))


def build_case(
    tree: Tree, heads: HeadConfig, page_size: int, dtype: torch.dtype, device: torch.device, **more
) -> Case:
    """Make the case of a tree; `more` of build_batch_case.

    Raises ValueError when the tree does not fit the page size.
    """
    if problem := page_problem(tree, page_size):
        raise ValueError(f"tree {tree.name}: {problem}")
    paths, unique = tree.paths(), tree.unique_tokens
    return build_batch_case(paths, unique, heads, page_size, dtype, device, tree=tree, **more)


def build_batch_case(
    paths: PathTable, unique_tokens: int, heads: HeadConfig, page_size: int, dtype: torch.dtype,
    device: torch.device, *, seed: int = 0, tokens: int = 1, kv_dtype: torch.dtype | None = None,
    tree: Tree | None = None,
) -> Case:  # fmt: skip
    """Make the case of requests that ask for their last `tokens` tokens and may differ in length:
    pages in random order, page 0 nobody's, random queries and pools. The same arguments, the same
    case on one kind of device. kv_dtype: None like dtype."""
    kv_dtype = kv_dtype or dtype
    table, num_slots = slots_of(paths, page_size, device)
    seq_lens = torch.from_numpy(paths.seq_lens.astype(np.int32)).to(device)
    inside = torch.arange(table.shape[1], device=device) < seq_lens[:, None]
    table = torch.where(inside, table + page_size, 0).to(torch.int32)
    is_unused = torch.ones(num_slots + page_size, dtype=torch.bool, device=device)
    is_unused[table[inside].long()] = False
    unused = is_unused.nonzero()[:, 0]
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    layers = num_pools(unique_tokens, heads, kv_dtype.itemsize)
    shape = (num_slots + page_size, heads.num_kv_heads, heads.head_dim)
    kinds = 1 if heads.latent_dim else 2
    pools = [
        random(*shape).index_fill_(0, unused, float("nan")).to(kv_dtype)
        for _ in range(kinds * layers)
    ]
    values = [k[..., : heads.latent_dim] for k in pools] if heads.latent_dim else pools[layers:]
    q = random(paths.seq_lens.size * tokens, heads.num_qo_heads, heads.head_dim)
    return Case(
        paths, tokens, heads, page_size, dtype, device, table, seq_lens, q,
        k=tuple(pools[:layers]), v=tuple(values), tree=tree,
    )  # fmt: skip
