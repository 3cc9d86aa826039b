"""Random forests and planners that make small ones use every mechanism."""

import numpy as np
from hypothesis import strategies as st

from sgl_prefix_attn.kernels import words as W
from sgl_prefix_attn.plan.costs import CostModel
from sgl_prefix_attn.plan.kernel_rates import PortableRates
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.records import HeadConfig, PathTable

LENGTHS = (1, 2, 7, 15, 16, 17, 31, 63, 64, 65, 130)
# short and long nodes beside each other, around PAT's threshold of 4 tokens a query
PROFIT_LENGTHS = (1, 2, 3, 4, 5, 8, 12, 16, 17, 40, 200)


def bytes_only(heads: HeadConfig) -> CostModel:
    """Cost = bytes of 16-bit KV and partial results, as PAT's profit model counts them."""
    return CostModel(
        kv_token=4 * heads.num_kv_heads * heads.head_dim,
        mma_row=0.0,
        partial=2 * heads.num_qo_heads * (2 * heads.head_dim + 8),
        item=0.0,
        group_size=heads.group_size,
    )


def kernel_costs(heads: HeadConfig, gpu: str) -> CostModel:
    """Costs of the portable kernel on an H100, or on one with a third of its bandwidth."""
    rates = PortableRates() if gpu == "H100" else PortableRates(hbm=1e6)
    return CostModel.of(rates, heads, num_sms=264, tile_rows=64)


def path_table(nodes, leaf, tails) -> PathTable:
    """nodes [(parent, length)], leaf [node or -1], tails [tokens >= 1] -> PathTable."""
    depth = []
    for parent, length in nodes:
        depth.append(length + (depth[parent] if parent >= 0 else 0))
    seq_lens = [
        tail + (depth[node] if node >= 0 else 0) for node, tail in zip(leaf, tails, strict=True)
    ]
    parents, lengths = zip(*nodes, strict=True) if nodes else ((), ())
    return PathTable.of(parents, lengths, leaf, seq_lens, node_id=range(100, 100 + len(nodes)))


def random_paths(seed: int, batch: int, num_nodes: int, lengths=LENGTHS, max_depth=6) -> PathTable:
    """Several roots, chains, nodes without requests, empty paths, requests that share all."""
    rng = np.random.default_rng(seed)
    nodes, depth = [], []
    for i in range(num_nodes):
        # the larger of two: chains are as frequent as bushes
        parent = int(rng.integers(-1, i, 2).max()) if i and rng.random() < 0.8 else -1
        while parent >= 0 and depth[parent] >= max_depth:
            parent = nodes[parent][0]
        depth.append(1 + (depth[parent] if parent >= 0 else 0))
        nodes.append((parent, int(rng.choice(lengths))))
    # most requests meet at a few nodes and share the whole chain above them
    spots = rng.integers(-1, num_nodes, 1 + batch // 4)
    leaf = np.where(
        rng.random(batch) < 0.7, rng.choice(spots, batch), rng.integers(-1, num_nodes, batch)
    )
    return path_table(nodes, leaf.tolist(), rng.choice(lengths, batch).tolist())


@st.composite
def path_tables(draw, max_nodes=10, max_batch=9, max_depth=6, lengths=LENGTHS, min_batch=1):
    """Any forest up to these sizes; the sizes shrink, the shape comes from a seed, because drawn
    edge by edge a third of all forests would share nothing."""
    num_nodes = draw(st.sampled_from(range(max_nodes + 1)))
    batch = draw(st.sampled_from(range(min_batch, max_batch + 1)))
    seed = draw(st.integers(0, 2**32 - 1))
    return random_paths(seed, batch, num_nodes, lengths, max_depth)


def nested_paths(batch: int, length: int, tail=3) -> PathTable:
    """Requests whose prompts are each a prefix of the next one, a node of `length` tokens apart."""
    nodes = [(level - 1, length) for level in range(batch)]
    return path_table(nodes, range(batch), [tail] * batch)


def chain(paths: PathTable, row: int) -> list[int]:
    """Nodes of a request's path, root first."""
    nodes, node = [], int(paths.leaf[row])
    while node >= 0:
        nodes.append(node)
        node = int(paths.parent[node])
    return nodes[::-1]


def owners(paths: PathTable, row: int) -> np.ndarray:
    """For each KV position of a request: the node that holds it, or ~row where it is private."""
    parts = [np.full(paths.length[node], node) for node in chain(paths, row)]
    parts = np.concatenate([*parts, np.empty(0, np.int64)])
    return np.concatenate([parts, np.full(paths.seq_lens[row] - parts.size, ~row)])


def sharers(paths: PathTable, row: int) -> list[frozenset[int]]:
    """For each KV position of a request: the requests that share it."""
    below: dict[int, set[int]] = {}
    for other in range(paths.leaf.size):
        for node in chain(paths, other):
            below.setdefault(node, set()).add(other)
    return [frozenset(below[o]) if o >= 0 else frozenset([row]) for o in owners(paths, row)]


def planner(heads, strategy="calibrated", headroom=20) -> Planner:
    """As on a small GPU, so that few requests fill it and few blocks are split."""
    rows = W.portable_tile_rows(heads.group_size)
    return Planner(
        heads, num_sms=16, rates=PortableRates(), headroom=headroom, tile_rows=rows,
        strategy=strategy, splits_nodes=True,
    )  # fmt: skip
