"""Random forests and planners that make small ones use every mechanism."""

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from sgl_prefix_attn.plan import CostModel, Planner, TileConfig, TileSet
from sgl_prefix_attn.plan.costs import partial_bytes
from sgl_prefix_attn.records import HeadConfig, PathTable

LENGTHS = (1, 2, 7, 15, 16, 17, 31, 63, 64, 65, 130)
# short and long nodes beside each other, around PAT's threshold of 4 tokens a query
PROFIT_LENGTHS = (1, 2, 3, 4, 5, 8, 12, 16, 17, 40, 200)


def bytes_only(heads: HeadConfig, kv_bytes: int = 2) -> CostModel:
    """Cost = bytes of KV and partial results, as PAT's profit model counts them."""
    kv_token = 2 * heads.num_kv_heads * heads.head_dim * kv_bytes
    partial = partial_bytes(heads, kv_bytes)
    free = splitting_costs(heads)
    return replace(free, kv_token=kv_token, partial=partial, mma_row=0.0, chain=0.0)


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


@st.composite
def deep_paths(draw, max_batch=40, lengths=LENGTHS):
    """Chains as deep as the batch is large, with branches: what needs most partial results."""
    batch = draw(st.integers(2, max_batch))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    straight = draw(st.sampled_from([0.5, 0.9, 1.0]))
    nodes = [(-1, int(rng.choice(lengths)))]
    for i in range(1, batch):
        parent = i - 1 if rng.random() < straight else int(rng.integers(-1, i))
        nodes.append((parent, int(rng.choice(lengths))))
    leaf = rng.permutation(batch) if draw(st.booleans()) else rng.integers(0, batch, batch)
    return path_table(nodes, leaf.tolist(), rng.choice(lengths, batch).tolist())


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


def splitting_tiles(heads: HeadConfig, packed=True) -> TileSet:
    """Small tiles that make short KV use every mechanism: row tiles, several block_n, packed tails
    of 2 to 4 requests, splits from 16 tokens on."""
    group = heads.group_size
    tail_m = max(16, 1 << (group - 1).bit_length())
    requests = min(4, 1 << (tail_m // group).bit_length() - 1)
    return TileSet(
        shared=(TileConfig(tail_m, 16), TileConfig(2 * tail_m, 64)),
        tail=TileConfig(tail_m, 32, requests=1),
        packed_tail=TileConfig(tail_m, 32, requests=requests) if packed and requests > 1 else None,
        packed_len=64,
        packed_tickets=1,
        num_sms=4,
        min_split=16,
        longest=(0.2,),
    )


def splitting_costs(heads: HeadConfig) -> CostModel:
    """As on an unknown GPU, but starting work is free: splits pay from the first token."""
    return replace(CostModel.for_gpu("other", heads), item=0.0, pack=0.0, launch=0.0)


def planner(heads, strategy="calibrated", headroom=20, split=True, packed=True) -> Planner:
    tiles = splitting_tiles(heads, packed)
    if not split:
        tiles = replace(tiles, min_split=1 << 20)
    return Planner(
        heads, tile_set=tiles, strategy=strategy, costs=splitting_costs(heads), headroom=headroom
    )
