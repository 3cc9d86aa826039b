"""`sgl-prefix-attn explain`: how a batch would be planned, as text or as a picture."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from sgl_prefix_attn.records import CALIBRATED, STRATEGIES
from sgl_prefix_attn.tools.argument_types import new_file
from sgl_prefix_attn.tools.model_heads import add_heads, chosen_heads
from sgl_prefix_attn.tools.named_gpus import GPUS, add_server, server_on
from sgl_prefix_attn.tools.output import busy, table_console

if TYPE_CHECKING:
    from sgl_prefix_attn.plan.view import PlanView
    from sgl_prefix_attn.records import PathTable


def add_parser(commands) -> None:
    parser = commands.add_parser("explain", help="how a batch would be planned; needs no GPU")
    parser.add_argument(
        "spec",
        metavar="SPEC",
        help="nodes per level _ KV tokens per level, such as 1,2,6_1024,512,64, or a JSON file "
        "with paths and seq_lens, as PrefixAttentionWrapper.plan takes them and PREFIX_ATTN_DUMP "
        "writes them",
    )
    add_server(parser)
    add_heads(parser)
    parser.add_argument(
        "--strategy", default=CALIBRATED, choices=STRATEGIES, help=f"default: {CALIBRATED}"
    )
    parser.add_argument(
        "--png", type=new_file, metavar="FILE", help="write a plot to FILE (needs matplotlib)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Return exit status 0. Raises ValueError and OSError for arguments or a file that cannot be
    used."""
    # Not before: these import torch and numba.
    from sgl_prefix_attn.tools.explain import text
    from sgl_prefix_attn.tools.plan_spec import read_spec

    if args.png:
        try:
            from sgl_prefix_attn.tools.explain import figure
        except ImportError as error:
            raise ValueError(f"--png needs matplotlib ({error}): pip install matplotlib") from None
    with busy("planning"):
        paths, said = read_spec(args.spec)
        view = plan_view(paths, args)
    if args.png:
        with busy("drawing"):
            # Without matplotlib's version: the bytes depend on nothing but the picture.
            figure.draw(view).savefig(args.png, format="png", metadata={"Software": None})
        print(f"written: {args.png}")
        return 0
    console = table_console()
    console.print(text.render(view))
    if said:
        console.print(said, markup=False)
    return 0


def plan_view(paths: PathTable, args: argparse.Namespace) -> PlanView:
    """Plan and decide as a server on this GPU would with the shipped calibrations."""
    from sgl_prefix_attn.plan.forest import build_forest
    from sgl_prefix_attn.plan.view import view
    from sgl_prefix_attn.step.evaluate import evaluate
    from sgl_prefix_attn.step.policy import BatchFacts

    _, heads = chosen_heads(args)
    server = server_on(GPUS[args.gpu], heads, args.kernels, args.strategy)
    done = evaluate(paths, BatchFacts(), server.planner, server.predictor)
    return view(done.plan, build_forest(paths), done.decision, server.planner)
