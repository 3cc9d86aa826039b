"""What `explain` plans: a tree such as 1,2,6_1024,512,64, or a JSON file of paths."""

from pathlib import Path

import orjson

from sgl_prefix_attn.api import argument_checks as checks
from sgl_prefix_attn.explain.tree import Tree
from sgl_prefix_attn.records import PathTable


def read_spec(text: str) -> PathTable:
    """A tree where the text is `COUNTS_LENGTHS`, otherwise a file's paths.

    Raises ValueError that says what is wrong with it.
    """
    if text.endswith(".json") or Path(text).is_file():
        return read_paths(Path(text))
    if "_" not in text:
        raise ValueError(f"{text!r} is neither a file nor a tree such as 1,2,6_1024,512,64")
    return Tree.parse(text).paths()


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
