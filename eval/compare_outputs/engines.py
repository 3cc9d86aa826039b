"""What both comparisons start: the seeded model, the engine's arguments, their command line."""

from __future__ import annotations

import argparse
from pathlib import Path

from eval import provenance
from eval.arguments import several
from eval.compare_outputs import faults, scenarios
from eval.engine_process import uses_prefix
from eval.model_shapes import SHAPES
from eval.tiny_model import write_tiny_llama
from sgl_prefix_attn.cli.argument_types import count

SEED = 1234
MAX_RUNNING_REQUESTS = 96
_VOCAB = 32768  # the layers have the shape's size, the embedding need not


def vocab(args) -> int:
    return min(_VOCAB, SHAPES[args.model_shape]["vocab_size"])


def write_model(folder: Path, args) -> Path:
    shape = SHAPES[args.model_shape]
    return write_tiny_llama(
        folder,
        seed=SEED,
        layers=args.layers,
        hidden=shape["hidden_size"],
        intermediate=shape["intermediate_size"],
        num_qo_heads=shape["num_attention_heads"],
        num_kv_heads=shape["num_key_value_heads"],
        head_dim=shape["head_dim"],
        vocab=vocab(args),
        max_position=shape["max_position_embeddings"],
    )


def engine_arguments(args, model: Path, page_size: int) -> dict:
    arguments = {
        "model_path": str(model),
        "skip_tokenizer_init": True,
        "page_size": page_size,
        "grammar_backend": "none",
        "sampling_backend": "pytorch",
        "random_seed": 1,
        "skip_server_warmup": True,
        "log_level": "warning",
        "max_running_requests": MAX_RUNNING_REQUESTS,
    }
    if args.device == "cpu":
        return arguments | {"device": "cpu", "dtype": "float32", "max_total_tokens": 16384}
    return arguments | {
        "dtype": "bfloat16",
        "max_total_tokens": 262144,
        "mem_fraction_static": 0.8,
        "cuda_graph_bs_decode": [1, 4, 8, 16, 32, 64, 96],  # every other size is padded
    }


def environment(backend: str) -> dict[str, str]:
    """Prefix kernels in every step that can run them: they are what is judged, not the policy."""
    return {"SGL_PREFIX_ATTN_POLICY": "prefix"} if uses_prefix(backend) else {}


def meta(argv: list[str], args) -> dict:
    """Of a result file; argv is the command line of eval.compare_outputs."""
    return provenance.collect(
        "eval.compare_outputs",
        argv,
        seed=SEED,
        model_shape=args.model_shape,
        layers=args.layers,
    )


def add_arguments(parser: argparse.ArgumentParser, default_scenarios: list[str]) -> None:
    """Arguments of both commands."""
    parser.add_argument("--model-shape", default="llama3.1-8b", choices=list(SHAPES))
    parser.add_argument("--layers", type=count, default=4)
    parser.add_argument("--scenarios", default=",".join(default_scenarios))
    parser.add_argument("--page-size", type=several(count), default="1,16")
    parser.add_argument("--new-tokens", type=count, default=64)
    parser.add_argument("--scale", type=count, default=1, help="divides all prompt lengths")
    parser.add_argument("--fault", choices=list(faults.FAULTS), help="planted in the tested engine")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--json", metavar="OUT")


def parse(parser: argparse.ArgumentParser, argv: list[str]):
    """Arguments with scenarios as a list; ends with usage when they are wrong."""
    args = parser.parse_args(argv)
    args.scenarios = args.scenarios.split(",")
    unknown = [name for name in args.scenarios if name not in scenarios.SCENARIOS]
    if unknown:
        parser.error(f"scenario {unknown[0]!r}: known are {', '.join(scenarios.SCENARIOS)}")
    return args


def build_requests(args) -> dict[str, list[scenarios.Request]]:
    return {
        name: scenarios.build(name, vocab(args), args.new_tokens, args.scale)
        for name in args.scenarios
    }
