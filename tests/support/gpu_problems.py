"""Problems of the GPU tests."""

import torch

from sgl_prefix_attn.records import HeadConfig, PathTable
from tests.support.forests import path_table, random_paths
from tests.support.problems import Problem, make_problem

DEVICE = "cuda"
LLAMA = HeadConfig(32, 8, 128)


def gpu_problem(paths: PathTable, heads=LLAMA, dtype=torch.bfloat16, **options) -> Problem:
    return make_problem(paths, heads, dtype, device=DEVICE, **options)


# --- trees: name -> paths; every length that ends a tile, a split or a page somewhere ------------


def _mixed() -> PathTable:
    """37 requests: shared by all, by some, by none; tails from 1 to 700 tokens."""
    nodes = [(-1, 512), (0, 96), (0, 33), (1, 64), (-1, 200)]
    leaf = [1] * 6 + [2] * 9 + [3] * 7 + [0] * 4 + [4] * 5 + [-1] * 6
    tails = [1 + (53 * i) % 97 for i in range(31)] + [1, 63, 64, 65, 700, 301]
    return path_table(nodes, leaf, tails)


def _deep() -> PathTable:
    """A chain of fourteen nodes; requests leave it at every depth, two at each."""
    lengths = [64, 1, 130, 17, 16, 63, 65, 128, 31, 2, 256, 7, 15, 40]
    nodes = [(i - 1, length) for i, length in enumerate(lengths)]
    leaf = [i for i in range(len(nodes)) for _ in range(2)]
    return path_table(nodes, leaf, [1 + (29 * i) % 70 for i in range(len(leaf))])


def _forty_roots() -> PathTable:
    nodes = [(-1, 16 + 13 * i) for i in range(40)]
    leaf = [i for i in range(40) for _ in range(1 + i % 3)]
    return path_table(nodes, leaf, [1 + (17 * i) % 50 for i in range(len(leaf))])


TREES = {
    "mixed": _mixed,
    "deep": _deep,
    "forty_roots": _forty_roots,
    "one_root_113": lambda: path_table(
        [(-1, 1024)], [0] * 113, [1 + (31 * i) % 130 for i in range(113)]
    ),
    "one_root_long": lambda: path_table([(-1, 4097)], [0] * 19, [1 + i for i in range(19)]),
    "unshared_37": lambda: path_table([], [-1] * 37, [1 + (61 * i) % 500 for i in range(37)]),
    "lengths_1_63_4097": lambda: path_table([], [-1] * 6, [1, 63, 4097, 1, 63, 4097]),
    "batch_1": lambda: path_table([(-1, 63)], [0], [4034]),
    "one_token": lambda: path_table([], [-1], [1]),
    "random": lambda: random_paths(5, 50, 24, max_depth=9),
}
