"""What `explain` plans: a tree such as 1,2,6_1024,512,64, or a JSON file of paths."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import orjson

from sgl_prefix_attn.api import argument_checks as checks
from sgl_prefix_attn.records import PathTable


def read_spec(text: str) -> PathTable:
    """A tree where the text is `COUNTS_LENGTHS`, otherwise a file's paths.

    Raises ValueError that says what is wrong with it.
    """
    if text.endswith(".json") or Path(text).is_file():
        return read_paths(Path(text))
    return parse_tree(text)


def parse_tree(text: str) -> PathTable:
    """Nodes per level and KV tokens per level, from the roots to the leaves: `1,2,6_1024,512,64`.

    A leaf is a request, its tokens are private. Node j of a level of n hangs below node
    j * m // n of the level of m above. Raises ValueError that quotes the tree.
    """
    try:
        counts, lengths = (tuple(map(int, half.split(","))) for half in text.split("_"))
    except ValueError:
        raise ValueError(
            f"{text!r} is neither a file nor a tree such as 1,2,6_1024,512,64"
        ) from None
    if len(counts) != len(lengths) or min(counts + lengths) < 1:
        raise ValueError(f"tree {text!r}: as many counts as lengths, each at least 1")
    if list(counts) != sorted(counts):
        raise ValueError(f"tree {text!r}: a level has fewer nodes than the one above it")
    batch, paths = counts[-1], []
    for row in range(batch):
        node, path = row, []
        for level in reversed(range(len(counts) - 1)):
            node = node * counts[level] // counts[level + 1]
            path.append((sum(counts[:level]) + node, lengths[level]))
        paths.append(path[::-1])
    return checks.path_table(paths, np.full(batch, sum(lengths), np.int32))


def read_paths(file: Path) -> PathTable:
    """`{"paths": [[[node id, tokens], ...], ...], "seq_lens": [...]}`: the arguments of
    PrefixDecodeWrapper.plan. Raises ValueError that names the file."""
    try:
        content = orjson.loads(file.read_bytes())
        return checks.path_table(content["paths"], checks.lengths(content["seq_lens"]))
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}") from None
    except KeyError as error:
        raise ValueError(f"{file}: has no {error}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from None
