"""python -m eval.workloads LOAD...: what loads share, and their traces.

--traces writes each as a trace that `sgl-prefix-attn analyze` reads, which predicts what the plugin
gains on it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from eval.cli_values import amount
from eval.markdown import table
from eval.model_shapes import SHAPES
from eval.workloads import catalogue
from eval.workloads.load import write_trace
from sgl_prefix_attn.tools.argument_types import seed

_SHAPE = SHAPES["llama3.1-8b"]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.workloads", description=__doc__)
    parser.add_argument("loads", nargs="+", metavar="LOAD", help=", ".join(catalogue.NAMES))
    parser.add_argument("--seed", type=seed, default=1)
    parser.add_argument("--azure-trace", type=Path, metavar="CSV")
    parser.add_argument("--mooncake-trace", type=Path, metavar="JSONL")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="LOAD.jsonl is written into it")
    parser.add_argument("--rate", type=amount, help="requests/s of traces; without: all at once")
    args = parser.parse_args(argv)
    longest = _SHAPE["max_position_embeddings"] - 8
    choice = catalogue.Choice(
        args.seed, longest, azure=args.azure_trace, mooncake=args.mooncake_trace
    )
    try:
        if args.traces:
            args.traces.mkdir(parents=True, exist_ok=True)
        loads = [catalogue.build(name, choice) for name in args.loads]
    except (OSError, ValueError) as error:
        parser.error(str(error))
    rows = []
    for load in loads:
        facts = load.facts()
        shared = facts["shared_tokens"] / facts["input_tokens"]
        rows.append((load.name, facts["requests"], f"{shared:.0%}"))
        if args.traces:
            path = args.traces / f"{load.name}.jsonl"
            write_trace(load, path, seed=args.seed, vocab_size=_SHAPE["vocab_size"], rate=args.rate)
    print(table(("load", "requests", "prompt shared"), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
