"""Command lines of the evaluations: arguments that many take, and types of arguments, before whose
complaints argparse puts the argument's name."""

from __future__ import annotations

import argparse
import json
from argparse import ArgumentTypeError
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TypeVar

import torch

from sgl_prefix_attn.tools.argument_types import amount as amount
from sgl_prefix_attn.tools.argument_types import count
from sgl_prefix_attn.tools.calibrate.writing import try_folder

T = TypeVar("T")
_BACKENDS = (
    "names joined by commas, the first of which others are compared with: flashinfer, fa3, prefix, "
    "PREFILL/DECODE such as fa3/prefix; prefix:KERNELS forces its kernels; servers also know "
    "default, what SGLang picks"
)


def benchmark(
    module: str, doc: str, shapes: Iterable[str] = (), backends: str | None = None,
    alternations: int = 0, new_tokens: str = "",
) -> argparse.ArgumentParser:  # fmt: skip
    """Make the parser of a benchmark: --device and --json; of engines and servers --model-shape,
    too, and with their defaults --backends ("": it depends), --alternations and --new-tokens."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if backends is not None:
        parser.add_argument("--backends", type=names, default=backends or None, help=_BACKENDS)
    if shapes := list(shapes):
        parser.add_argument("--model-shape", default="llama3.1-8b", choices=shapes)
    if alternations:
        parser.add_argument("--alternations", type=count, default=alternations, help="of each")
    if new_tokens:
        says = "short and long generation"
        parser.add_argument("--new-tokens", type=less_more, default=new_tokens, help=says)
    parser.add_argument("--device", type=device, default="cuda", help="cpu: small runs only")
    parser.add_argument("--json", type=output, metavar="OUT", help="result file")
    return parser


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --engine-arguments."""
    parser.add_argument(
        "--engine-arguments", type=json_object, default={}, metavar="JSON",
        help='others of sglang.Engine, such as {"kv_cache_dtype": "fp8_e4m3"}',
    )  # fmt: skip


def told(kind: Callable[[str], T]) -> Callable[[str], T]:
    """Make of a parser that raises ValueError one whose reasons argparse tells: of a ValueError it
    would name the function alone."""

    def parse(text: str) -> T:
        try:
            return kind(text)
        except ValueError as error:
            raise ArgumentTypeError(str(error)) from None

    return parse


def several(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Make a parser of lists of them, separated by commas."""
    return told(lambda text: [kind(part) for part in text.split(",")])


def json_object(text: str) -> dict:
    """Parse an object in JSON."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ArgumentTypeError(f"no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ArgumentTypeError(f"expected an object such as {{}}, got {text}")
    return found


def names(text: str) -> list[str]:
    """Parse names separated by commas, each once."""
    found = text.split(",")
    if not all(found):
        raise ArgumentTypeError(f"a name is missing in {text!r}")
    if len(set(found)) < len(found):
        raise ArgumentTypeError("names one twice")
    return found


def names_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """Make a parser of known names separated by commas, each once."""

    def parse(text: str) -> list[str]:
        found = names(text)
        if unknown := sorted(set(found) - set(known)):
            raise ArgumentTypeError(f"{unknown[0]!r}, known are {', '.join(known)}")
        return found

    return parse


def less_more(text: str) -> list[int]:
    """Parse two counts, the smaller one first."""
    found = several(count)(text)
    if len(found) != 2 or found[0] >= found[1]:
        raise ArgumentTypeError(f"expected LESS,MORE, got {text}")
    return found


def output(text: str) -> str:
    """Parse the path of a file to write, whose folder is made: a run of minutes must not end where
    nothing can be written."""
    if Path(text).is_dir():
        raise ArgumentTypeError(f"{text} cannot be written: it is a folder")
    try:
        try_folder(Path(text))
    except OSError as error:
        raise ArgumentTypeError(f"{text} cannot be written: {error.strerror}") from None
    return text


def device(text: str) -> torch.device:
    """Parse cpu or cuda, which must be there."""
    try:
        found = torch.device(text)
    except RuntimeError as error:
        raise ArgumentTypeError(str(error)) from None
    if found.type not in ("cpu", "cuda") or found.index:
        raise ArgumentTypeError(
            f"expected cpu or cuda, got {text}; CUDA_VISIBLE_DEVICES says which GPU is cuda"
        )
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ArgumentTypeError(
            f"torch {torch.__version__} sees no CUDA GPU here; --device cpu is for small runs"
        )
    return found
