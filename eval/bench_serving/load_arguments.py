"""Command lines of servers under load: the arguments that loads are made of."""

from __future__ import annotations

import argparse
from pathlib import Path

from eval.cli_values import amount, names
from eval.model_shapes import SHAPES
from eval.workloads import catalogue
from eval.workloads.load import Load, Scale
from sgl_prefix_attn.tools.argument_types import count

SEED = 1
# Settings that a result file names.
SETTINGS = ("model_shape", "max_running", "length_scale", "count_scale")
_RUNNING = "requests of a step; behind a prompt in chunks SGLang admits one less"


def add_load_arguments(parser: argparse.ArgumentParser, loads: str) -> None:
    """Add --loads, with its default, and what they depend on."""
    parser.add_argument(
        "--loads", type=names, default=loads,
        help=f"{', '.join(catalogue.NAMES)} or {catalogue.SPELLING}",
    )  # fmt: skip
    parser.add_argument("--azure-trace", type=Path, metavar="CSV", help="lengths of conversation")
    parser.add_argument("--mooncake-trace", type=Path, metavar="JSONL", help="the load mooncake")
    parser.add_argument("--length-scale", type=amount, default=1.0, help="of prompts and outputs")
    parser.add_argument("--count-scale", type=amount, default=1.0, help="of requests or groups")
    parser.add_argument("--max-running", type=count, default=256, help=_RUNNING)


def loads_of(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[Load]:
    """Make the loads; what cannot be ends the command."""
    choice = catalogue.Choice(
        seed=SEED, longest=SHAPES[args.model_shape]["max_position_embeddings"] - 8,
        scale=Scale(args.length_scale, args.count_scale), azure=args.azure_trace,
        mooncake=args.mooncake_trace,
    )  # fmt: skip
    try:
        return [catalogue.build(name, choice) for name in args.loads]
    except (OSError, ValueError) as error:
        parser.error(str(error))
