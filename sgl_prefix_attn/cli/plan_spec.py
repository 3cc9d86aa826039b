"""What `explain` plans: a tree such as 1,2,6_1024,512,64, or a JSON file of paths."""

from pathlib import Path

import orjson

from sgl_prefix_attn.api import argument_checks as checks
from sgl_prefix_attn.explain.tree import MOST_TOKENS, Tree
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.records import PathTable


def read_spec(text: str) -> PathTable:
    """A tree where the text is `COUNTS_LENGTHS`, otherwise a file's paths.

    Raises ValueError that says what is wrong with it.
    """
    if text.endswith(".json") or Path(text).is_file():
        return read_paths(Path(text))
    if "_" not in text:
        raise ValueError(f"{text!r} is neither a file nor a tree such as 1,2,6_1024,512,64")
    tree = Tree.parse(text)
    try:
        _slots_count(tree.unique_tokens)  # before there are arrays of as many requests
    except ValueError as error:
        raise ValueError(f"tree {text!r}: {error}") from None
    return tree.paths()


def read_paths(file: Path) -> PathTable:
    """`{"paths": [[[node id, tokens], ...], ...], "seq_lens": [...]}`: the arguments of
    PrefixDecodeWrapper.plan. Raises ValueError that names the file."""
    try:
        content = orjson.loads(file.read_bytes())
        if not isinstance(content, dict):
            raise ValueError("it is no JSON object")
        table = checks.path_table(content["paths"], checks.lengths(content["seq_lens"]))
        _slots_count(build_forest(table).unique_tokens)
        return table
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}") from None
    except KeyError as error:
        raise ValueError(f"{file}: has no {error}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from None


def _slots_count(tokens: int) -> None:
    """Raises ValueError unless int32 slots count so many unique KV tokens."""
    if tokens > MOST_TOKENS:
        raise ValueError(
            f"seq_lens add up to {tokens} unique KV tokens, more than int32 slots count "
            f"({MOST_TOKENS})"
        )


def served(text: str) -> str:
    """What the server decided that wrote the file; "" for anything else.

    Raises ValueError that names the file.
    """
    if not Path(text).is_file():
        return ""
    content = orjson.loads(Path(text).read_bytes())
    if (decision := content.get("decision")) is None:
        return ""
    try:
        said = f"served: {decision['variant']} kernels ({decision['reason']})"
        if decision["prefix_us"] is None:
            return said
        return (
            f"{said}, predicted {decision['prefix_us']:.1f} us, "
            f"FlashInfer {decision['stock_us']:.1f} us"
        )
    except KeyError as error:
        raise ValueError(f"{text}: its decision has no {error}") from None
    except (TypeError, ValueError):
        raise ValueError(
            f"{text}: its decision is not as SGL_PREFIX_ATTN_DUMP writes it: {decision!r}"
        ) from None
