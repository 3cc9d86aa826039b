"""What `explain` plans: a tree such as 1,2,6_1024,512,64, or a JSON file of paths."""

import os
from pathlib import Path
from typing import Any

import orjson

from sgl_prefix_attn.api import argument_checks as checks
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.records import PathTable
from sgl_prefix_attn.tools.explain.tree import Tree

# Planning a million takes a minute or two, and some GB; KV positions and slots are int32.
_MOST = {"requests": 1_000_000, "shared nodes": 1_000_000, "unique KV tokens": (1 << 31) - 1}


def read_spec(text: str) -> tuple[PathTable, str]:
    """Read a tree where the text is `COUNTS_LENGTHS`, otherwise a file: its paths, and what the
    server decided that wrote it, "" without one.

    Raises ValueError that says what is wrong with it.
    """
    if text.endswith(".json") or os.path.isfile(text):  # Path's raises for a name that is too long
        return read_file(Path(text))
    if "_" not in text:
        raise ValueError(f"{text!r} is neither a file nor a tree such as 1,2,6_1024,512,64")
    tree = Tree.parse(text)
    # before there are arrays of as many
    _few_enough(tree.batch_size, sum(tree.counts[:-1]), tree.unique_tokens)
    return tree.paths(), ""


def read_file(file: Path) -> tuple[PathTable, str]:
    """Read `{"paths": [[[node id, tokens], ...], ...], "seq_lens": [...]}`, the arguments of
    PrefixAttentionWrapper.plan, perhaps with a decision. Raises ValueError that names the file."""
    try:
        content = orjson.loads(file.read_bytes())
        if not isinstance(content, dict):
            raise ValueError("it is no JSON object")
        seq_lens = checks.lengths(content["seq_lens"])
        table = checks.path_table(content["paths"], seq_lens)
        _few_enough(seq_lens.size, table.length.size, build_forest(table).unique_tokens)
        return table, _served(content.get("decision"))
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}") from None
    except KeyError as error:
        raise ValueError(f"{file}: has no {error}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from None


def _few_enough(*counts: int) -> None:
    """Raises ValueError for more requests, shared nodes or unique KV tokens than in _MOST."""
    for (what, most), count in zip(_MOST.items(), counts, strict=True):
        if count > most:
            raise ValueError(f"{count:,} {what}, more than explain plans ({most:,})")


def _served(decision: Any) -> str:
    """Say what a server decided."""
    if decision is None:
        return ""
    try:
        said = f"served: {decision['variant']} kernels ({decision['reason']})"
        if decision["prefix_us"] is not None:
            said += (
                f", predicted {decision['prefix_us']:.1f} us, "
                f"stock ones {decision['stock_us']:.1f} us"
            )
        if decision.get("aligned"):
            said += "; its plans are aligned (deterministic inference), which is not shown here"
        return said
    except KeyError as error:
        raise ValueError(f"its decision has no {error}") from None
    except (TypeError, ValueError):
        raise ValueError(
            f"its decision is not as PREFIX_ATTN_DUMP writes it: {decision!r}"
        ) from None
