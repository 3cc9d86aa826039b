"""`sgl-prefix-attn explain`: how a batch would be planned, as text or as a picture."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sgl_prefix_attn.cli.model_heads import heads_on_rank, parse_heads

# Name and streaming multiprocessors of the GPUs that plan.costs has rates of.
GPUS = {
    "H100": ("NVIDIA H100 80GB HBM3", 132),
    "H200": ("NVIDIA H200", 132),
    "A100": ("NVIDIA A100-SXM4-80GB", 108),
}
USAGE = 2


def add_parser(commands) -> None:
    parser = commands.add_parser("explain", help="how a batch would be planned; needs no GPU")
    parser.add_argument(
        "spec",
        metavar="SPEC",
        help="nodes per level _ KV tokens per level, such as 1,2,6_1024,512,64, or a JSON file "
        "with paths and seq_lens as PrefixDecodeWrapper.plan takes them",
    )
    parser.add_argument("--gpu", choices=GPUS, default="H100", help="to plan for (H100)")
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
    """Plan and decide as a server on this GPU would with the shipped calibrations."""
    from sgl_prefix_attn.cli.plan_spec import read_spec
    from sgl_prefix_attn.explain.view import view
    from sgl_prefix_attn.plan import Planner
    from sgl_prefix_attn.plan.tile_defaults import gpu_tile_set
    from sgl_prefix_attn.predict import store
    from sgl_prefix_attn.predict.predictor import Predictor
    from sgl_prefix_attn.predict.record import CalibrationKey
    from sgl_prefix_attn.step.evaluate import evaluate
    from sgl_prefix_attn.step.policy import BatchFacts

    heads = heads_on_rank(*parse_heads(args.heads), args.head_dim, tp=1)
    name, num_sms = GPUS[args.gpu]
    key = CalibrationKey(name, heads, "bfloat16", 1)
    found = store.find(key, num_sms, folders=store.Folders(None, store.SHIPPED)).calibration
    tile_set = gpu_tile_set(num_sms, heads)
    planner = Planner(heads, tile_set=tile_set, strategy=args.strategy, costs=found.costs)
    facts = BatchFacts(strategy=args.strategy)
    done = evaluate(read_spec(args.spec), facts, planner, Predictor(found))
    return view(done.plan, done.decision, heads, tile_set)
