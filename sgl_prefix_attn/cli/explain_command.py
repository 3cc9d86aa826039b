"""`sgl-prefix-attn explain`: how a batch would be planned, as text or as a picture."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sgl_prefix_attn.cli.model_heads import heads_on_rank, parse_heads

# Streaming multiprocessors of the GPUs that plan.costs has rates of.
NUM_SMS = {"H100": 132, "H200": 132, "A100": 108}
USAGE = 2


def add_parser(commands) -> None:
    parser = commands.add_parser("explain", help="how a batch would be planned; needs no GPU")
    parser.add_argument(
        "spec",
        metavar="SPEC",
        help="nodes per level _ KV tokens per level, such as 1,2,6_1024,512,64, or a JSON file "
        "with paths and seq_lens as PrefixDecodeWrapper.plan takes them",
    )
    parser.add_argument("--gpu", choices=NUM_SMS, default="H100", help="to plan for (H100)")
    parser.add_argument("--heads", default="32/8", help="query/KV heads of a rank (32/8)")
    parser.add_argument("--head-dim", type=int, default=128, help="(128)")
    parser.add_argument("--strategy", default="calibrated", help="profit model (calibrated)")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw it, needs matplotlib")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit status 0; 2 for arguments or a file that cannot be used."""
    # Not before: these import torch and numba.
    from rich.console import Console

    from sgl_prefix_attn.explain import text

    try:
        view = plan_view(args)
        if args.png is None:
            Console(highlight=False).print(text.render(view))
        else:
            figure = _figure()
            figure.save(figure.draw(view), args.png)
            print(f"written: {args.png}")
    except (ValueError, OSError) as error:
        print(f"sgl-prefix-attn explain: {error}", file=sys.stderr)
        return USAGE
    return 0


def _figure():
    try:
        from sgl_prefix_attn.explain import figure
    except ImportError as error:
        raise ValueError(f"--png needs matplotlib ({error}): pip install matplotlib") from None
    return figure


def plan_view(args: argparse.Namespace):
    """The plan that a server on this GPU would make, as explain.view reads it."""
    from sgl_prefix_attn.cli.plan_spec import read_spec
    from sgl_prefix_attn.explain.view import view
    from sgl_prefix_attn.plan import CostModel, Planner
    from sgl_prefix_attn.plan.tile_defaults import gpu_tile_set

    heads = heads_on_rank(*parse_heads(args.heads), args.head_dim, tp=1)
    tile_set = gpu_tile_set(NUM_SMS[args.gpu], heads)
    costs = CostModel.for_gpu(args.gpu, heads)
    planner = Planner(heads, tile_set=tile_set, strategy=args.strategy, costs=costs)
    return view(planner.plan(read_spec(args.spec)), heads, tile_set)
