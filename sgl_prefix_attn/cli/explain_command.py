"""`sgl-prefix-attn explain`: how a batch would be planned, as text or as a picture."""

from __future__ import annotations

import argparse
import sys

from sgl_prefix_attn.cli.exit_status import USAGE
from sgl_prefix_attn.cli.model_heads import heads_on_rank, parse_heads
from sgl_prefix_attn.cli.named_gpus import GPUS, add_server, server_on
from sgl_prefix_attn.cli.output import add_png, needs_matplotlib, table_console


def add_parser(commands) -> None:
    parser = commands.add_parser("explain", help="how a batch would be planned; needs no GPU")
    parser.add_argument(
        "spec",
        metavar="SPEC",
        help="nodes per level _ KV tokens per level, such as 1,2,6_1024,512,64, or a JSON file "
        "with paths and seq_lens, as PrefixDecodeWrapper.plan takes them and SGL_PREFIX_ATTN_DUMP "
        "writes them",
    )
    add_server(parser)
    parser.add_argument("--heads", default="32/8", help="query/KV heads of a rank (default: 32/8)")
    parser.add_argument("--head-dim", type=int, default=128, help="(default: 128)")
    parser.add_argument(
        "--strategy", default="calibrated", help="profit model (default: calibrated)"
    )
    add_png(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit status 0; 2 for arguments or a file that cannot be used."""
    # Not before: these import torch and numba.
    from sgl_prefix_attn.cli.plan_spec import served
    from sgl_prefix_attn.explain import row_tile_text, text

    try:
        view, is_row_tiles = plan_view(args)
        if args.png is None:
            said, console = served(args.spec), table_console()
            console.print((row_tile_text if is_row_tiles else text).render(view))
            if said:
                console.print(said, markup=False)
        else:
            base, row_tiles = _figures()
            base.save((row_tiles if is_row_tiles else base).draw(view), args.png)
            print(f"written: {args.png}")
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        print(f"sgl-prefix-attn explain: {error}", file=sys.stderr)
        return USAGE
    return 0


def _figures():
    with needs_matplotlib():
        from sgl_prefix_attn.explain import figure, row_tile_figure
    return figure, row_tile_figure


def plan_view(args: argparse.Namespace):
    """Plan and decide as a server on this GPU would with the shipped calibrations.

    Returns a PlanView or RowTileView, and whether it is the latter.
    """
    from sgl_prefix_attn.cli.plan_spec import read_spec
    from sgl_prefix_attn.explain.row_tile_view import row_tile_view
    from sgl_prefix_attn.explain.view import view
    from sgl_prefix_attn.plan.forest import build_forest
    from sgl_prefix_attn.step.evaluate import evaluate
    from sgl_prefix_attn.step.policy import BatchFacts

    heads = heads_on_rank(*parse_heads(args.heads), args.head_dim, tp=1)
    server = server_on(GPUS[args.gpu], heads, args.kernels, args.strategy)
    facts = BatchFacts(strategy=args.strategy)
    paths = read_spec(args.spec)
    done = evaluate(paths, facts, server.planner, server.predictor)
    if server.tile_set is None:
        return row_tile_view(done.plan, build_forest(paths), done.decision, server.planner), True
    return view(done.plan, done.decision, heads, server.tile_set), False
