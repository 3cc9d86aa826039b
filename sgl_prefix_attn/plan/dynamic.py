"""Strategy `calibrated`: the cheapest split/merge choice, by one dynamic programme on the forest.

State (node, k): the node's pack begins at the start of its k-th ancestor-or-self, because the
nodes between merged downwards. At each state the node's children either stay in its pack (their
own packs begin at the child) or merge (their packs begin where the node's does, and the node's
pack does without their queries). A pack costs a fixed part for its KV plus a part that grows with
its queries, so the children are taken in order of what keeping each saves per query, and the best
cut of that order wins. Where the pack's cost is linear in its queries (pure byte costs), that cut
is the exact optimum; with tile rounding it is exact whenever the children are alike.
"""

import numpy as np

from sgl_prefix_attn.jit import cached_njit
from sgl_prefix_attn.plan.costs import CostModel
from sgl_prefix_attn.records import Forest, Packing


def optimal_packing(forest: Forest, costs: CostModel) -> Packing:
    """Minimise the predicted time of all packs; see the module's text for what is exact."""
    return Packing(
        *_solve(
            forest.parent, forest.start, forest.end, forest.num_queries,
            forest.tail_parent, forest.tail_start, forest.seq_lens,
            costs.kv_token, costs.mma_row, costs.partial, costs.item, costs.group_size,
            costs.row_step,
        )
    )  # fmt: skip


@cached_njit
def _pack_cost(kv_len, queries, kv_token, mma_row, fixed, group_size, row_step):
    """Cost one pack without its partial results; fixed: CostModel.item."""
    if queries == 0:
        return 0.0
    rows = -(-(queries * group_size) // row_step) * row_step
    return max(kv_len * kv_token, kv_len * rows * mma_row) + fixed


@cached_njit
def _tail_cost(kv_start, seq_len, kv_token, mma_row, partial, fixed, group_size, row_step):
    """Cost a request's own pack; from position 0 it is the only part and needs no merging."""
    cost = _pack_cost(seq_len - kv_start, 1, kv_token, mma_row, fixed, group_size, row_step)
    return cost + (partial if kv_start > 0 else 0.0)


@cached_njit
def _solve(
    parent, start, end, num_queries, tail_parent, tail_start, seq_lens,
    kv_token, mma_row, partial, fixed, group_size, row_step,
):  # fmt: skip
    num_nodes, batch = parent.size, tail_parent.size
    # children of each node as CSR: ids below num_nodes are nodes, the others tails
    above = np.concatenate((parent, tail_parent))
    offset = np.zeros(num_nodes + 1, np.int64)
    for node in above:
        if node >= 0:
            offset[node + 1] += 1
    offset = np.cumsum(offset)
    fill = offset[:-1].copy()
    children = np.empty(offset[-1], np.int64)
    for child, node in enumerate(above):
        if node >= 0:
            children[fill[node]] = child
            fill[node] += 1

    depth = np.zeros(num_nodes, np.int64)
    state = np.zeros(num_nodes + 1, np.int64)  # first state of each node
    for i in range(num_nodes):
        depth[i] = depth[parent[i]] + 1 if parent[i] >= 0 else 0
        state[i + 1] = state[i] + depth[i] + 1
    best = np.zeros(state[-1])
    edge_state = np.zeros(num_nodes + 1, np.int64)  # first decision bit of each node
    for i in range(num_nodes):
        edge_state[i + 1] = edge_state[i] + (depth[i] + 1) * (offset[i + 1] - offset[i])
    merged = np.zeros(edge_state[-1], np.bool_)

    for node in range(num_nodes - 1, -1, -1):
        degree = offset[node + 1] - offset[node]
        keep = np.empty(degree)  # cost below the child when it stays in this pack
        push = np.empty(degree)  # cost below the child when it merges
        weight = np.empty(degree, np.int64)
        for j in range(degree):
            child = children[offset[node] + j]
            if child >= num_nodes:
                row = child - num_nodes
                weight[j] = 1
                keep[j] = partial + _tail_cost(
                    tail_start[row], seq_lens[row], kv_token, mma_row, partial, fixed,
                    group_size, row_step,
                )  # fmt: skip
            else:
                weight[j] = num_queries[child]
                keep[j] = best[state[child]] + partial * weight[j]
        ancestor = node
        for k in range(depth[node] + 1):
            for j in range(degree):
                child = children[offset[node] + j]
                if child >= num_nodes:
                    push[j] = _tail_cost(
                        start[ancestor], seq_lens[child - num_nodes], kv_token, mma_row, partial,
                        fixed, group_size, row_step,
                    )  # fmt: skip
                else:
                    push[j] = best[state[child] + k + 1]
            order = np.argsort((keep - push) / weight)
            cost = push.sum()  # everything merges: this node has no pack
            lowest, cut, queries = cost, 0, 0
            kv_len = end[node] - start[ancestor]
            for j in range(degree):
                cost += keep[order[j]] - push[order[j]]
                queries += weight[order[j]]
                with_pack = cost + _pack_cost(
                    kv_len, queries, kv_token, mma_row, fixed, group_size, row_step
                )
                # on a tie the larger pack wins: it reads no more and leaves fewer long tails
                if with_pack <= lowest:
                    lowest, cut = with_pack, j + 1
            best[state[node] + k] = lowest
            for j in range(cut, degree):
                merged[edge_state[node] + k * degree + order[j]] = True
            ancestor = parent[ancestor]

    node_merged = np.zeros(num_nodes, np.bool_)
    tail_merged = np.zeros(batch, np.bool_)
    chain = np.zeros(num_nodes, np.int64)  # k of the state that each node ends up in
    for node in range(num_nodes):
        degree = offset[node + 1] - offset[node]
        for j in range(degree):
            if merged[edge_state[node] + chain[node] * degree + j]:
                child = children[offset[node] + j]
                if child >= num_nodes:
                    tail_merged[child - num_nodes] = True
                else:
                    node_merged[child] = True
                    chain[child] = chain[node] + 1
    return node_merged, tail_merged
