"""Forest -> a forest that shares less and needs fewer partial results.

Where each prompt is a prefix of the next one (turns of one agent side by side, deep tree search),
a request has a part for every level above it, and all parts together grow with the square of the
requests. Here the requests along a chain of nodes are cut in two halves: those that leave it early
share among themselves, once more from the chain's start, and those that stay longer have one node
for all of the chain up to there; then each half likewise.

At any price a KV slot stands in at most log2(B + 1) nodes and tails. Where every cut is made, a
request has at most log2(B) nodes above its tail, because each of them halves the requests around
it; so no forest needs more than B * (1 + log2(B)) partial results.
"""

import numpy as np

from sgl_prefix_attn.jit import cached_njit
from sgl_prefix_attn.records import Forest


def share_within(forest: Forest, partials: int) -> Forest:
    """Return the forest, or one that shares as much of it as `partials` partial results allow.

    Parts are counted as if every node had its own pack and none were split. Fewer partial results
    than any forest of this batch size can do with are not reached.
    """
    shared, price = forest, 1.0
    while shared.num_queries.sum() + shared.tail_parent.size > partials:
        if price >= 4 * forest.end.max(initial=0):
            break
        shared, price = balanced(forest, price), 4 * price
    return shared


def balanced(forest: Forest, price: float) -> Forest:
    """Cut chains in halves wherever that costs at most `price` KV tokens, read again, for each
    partial result that it saves; 0 cuts nothing, and the longest path's length everything."""
    parent, start, end, num_queries, tail_parent, tail_start = _balance(
        forest.parent, forest.start, forest.end, forest.num_queries, forest.tail_parent, price
    )
    return Forest(parent, start, end, num_queries, tail_parent, tail_start, forest.seq_lens)


@cached_njit
def _balance(parent, start, end, num_queries, tail_parent, price):
    """Return the columns of the new forest, seq_lens aside."""
    num_nodes = parent.size
    heavy = np.full(num_nodes, -1, np.int32)  # child with the most requests: chains go on there
    for node in range(num_nodes):
        above = parent[node]
        if above >= 0 and (heavy[above] < 0 or num_queries[node] > num_queries[heavy[above]]):
            heavy[above] = node

    new_parent = np.empty(num_nodes, np.int32)
    new_start, new_end = np.empty(num_nodes, np.int32), np.empty(num_nodes, np.int32)
    new_queries = np.empty(num_nodes, np.int32)
    size = 0
    # Of all that leaves a chain at a node: the new node above it, and where it begins.
    below, begin = np.empty(num_nodes, np.int32), np.empty(num_nodes, np.int32)
    chain = np.empty(num_nodes, np.int32)
    reach = np.empty(num_nodes + 1, np.int32)  # requests that read the chain's nodes; 0 behind it
    for top in range(num_nodes):
        if parent[top] >= 0 and heavy[parent[top]] == top:
            continue
        length, node = 0, top
        while node >= 0:
            chain[length], reach[length] = node, num_queries[node]
            length, node = length + 1, heavy[node]
        reach[length] = 0
        above = int(below[parent[top]]) if parent[top] >= 0 else -1
        stretches = [(0, length - 1, above)]  # first and last of the chain, new node above
        while stretches:
            first, last, above = stretches.pop()
            beyond = reach[last + 1]
            cut = _half(reach, first, last)
            copied = start[chain[cut]] - start[chain[first]]
            saved = (reach[cut] - beyond) * (cut - first)
            if copied > price * saved:
                cut = first
            node, queries = chain[cut], reach[cut] - beyond
            if queries == 1:  # nobody to share with
                below[node], begin[node] = above, start[node]
                continue
            below[node], begin[node] = size, end[node]
            new_parent[size], new_queries[size] = above, queries
            new_start[size], new_end[size] = start[chain[first]], end[node]
            if cut > first:
                stretches.append((first, cut - 1, above))
            if cut < last:
                stretches.append((cut + 1, last, size))
            size += 1

    tail_above = np.full(tail_parent.size, -1, np.int32)
    tail_start = np.zeros(tail_parent.size, np.int32)
    for row in range(tail_parent.size):
        node = tail_parent[row]
        if node >= 0:
            tail_above[row], tail_start[row] = below[node], begin[node]
    nodes = new_parent[:size], new_start[:size], new_end[:size], new_queries[:size]
    return nodes + (tail_above, tail_start)


@cached_njit
def _half(reach, first, last):
    """Return the first place of a stretch up to which half of its requests have left the chain."""
    whole, leaving = reach[first], reach[first] - reach[last + 1]
    while first < last:
        middle = (first + last) // 2
        if 2 * (whole - reach[middle + 1]) >= leaving:
            last = middle
        else:
            first = middle + 1
    return first
