"""python -m eval.policy_holdout [--json OUT]: what the policy's choices cost on held-out batches.

Calibrations are fixed on their own seeds. Batches of other seeds are measured with SGLang's
backends and with the plan that a server would make beside each (CUDA graphs, cold L2), predicted
and decided as such a server does. Regret is the time of the chosen kernels over the time of the
fastest ones, those of the other servers included. Exit status 0 whatever the numbers are, 1 when no
batch could be measured.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from eval import provenance
from eval.cli_values import names, output, several
from eval.policy_holdout import policy_text
from eval.policy_holdout.holdout import check_seeds, judged
from eval.policy_holdout.regret import judge_each
from sgl_prefix_attn.predict import store
from sgl_prefix_attn.predict.record import CalibrationKey
from sgl_prefix_attn.records import FA3, FLASHINFER, HeadConfig
from sgl_prefix_attn.tools.argument_types import count
from sgl_prefix_attn.tools.calibrate.batches import draw
from sgl_prefix_attn.tools.calibrate_command import find_gpu, new_meter, progress_bar
from sgl_prefix_attn.tools.model_heads import parse_heads
from sgl_prefix_attn.tools.named_gpus import add_kernels, family_on, server_of

DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


def main(argv: list[str]) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        gpu, dtype = find_gpu(args.fallbacks), DTYPES[args.dtype]
        heads = HeadConfig(*parse_heads(args.heads), args.head_dim)
        family = family_on(gpu.capability, heads, dtype, args.kernels)
        facts: Any = gpu.name, family.name, heads, dtype, args.page_size
        keys = {name: CalibrationKey(*facts, fallback=name) for name in args.fallbacks}
        found = {
            name: _calibration(args.calibration, key, gpu.num_sms) for name, key in keys.items()
        }
        for used in found.values():
            check_seeds(args.seeds, used.calibration)
    except ValueError as error:
        parser.error(str(error))
    for name, used in found.items():
        print(f"{gpu.name}, {family}, {name}; {used.message}")
    setup = {"gpu": gpu.name, "num_sms": gpu.num_sms, **vars(args), "kernels": family.name}
    first, *others = [
        asdict(used.calibration) | {"message": used.message} for used in found.values()
    ]
    meta = provenance.collect("eval.policy_holdout", argv) | {
        "setup": {name: setup[name] for name in setup if name not in ("calibration", "json")},
        "calibration": first,
        "other_calibrations": others,
    }
    servers = {name: server_of(family, used.calibration) for name, used in found.items()}
    meter = new_meter(keys[args.fallbacks[0]], args.pool_tokens, args.fallbacks)
    for server in servers.values():
        server.planner.warm_up()
    rows: list[dict] = []
    with progress_bar(Console(stderr=True)) as progress:
        bar = progress.add_task("", total=args.batches * len(args.seeds))
        for seed in args.seeds:
            progress.update(bar, description=f"seed {seed}")
            drawn = draw(seed, args.batches, args.pool_tokens, args.page_size)
            for index, batch in enumerate(drawn):
                whose = {"seed": seed, "index": index}
                rows += [whose | row for row in judged(batch, servers, meter)]
                progress.advance(bar)
            summary = judge_each(rows)
            provenance.save(args.json, meta, rows, summary=summary)
    print(policy_text.report(rows, summary, meta))
    return 0 if summary["all"] else 1


def _calibration(paths: list[Path], key: CalibrationKey, num_sms: int) -> store.Found:
    """Return that of a file of the key's fallback, or the one that a server would use."""
    for path in paths:
        if store.load(path).key.fallback == key.fallback:
            given = store.load(path, key)
            return store.Found(given, f"calibration {path} ({given.origin})", False)
    return store.find(key, num_sms)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m eval.policy_holdout", description=__doc__)
    parser.add_argument(
        "--calibration", type=Path, action="append", default=[], metavar="FILE",
        help="of one of the fallbacks, may be given for each; default: a server's on this GPU",
    )  # fmt: skip
    parser.add_argument(
        "--fallbacks", type=names, default=[FLASHINFER, FA3],
        help="SGLang's backends to judge the policy with; figures are the first one's "
        "(flashinfer,fa3)",
    )  # fmt: skip
    parser.add_argument(
        "--seeds", type=several(count), required=True,
        help="that nothing was chosen by; not below 101",
    )  # fmt: skip
    parser.add_argument("--batches", type=count, default=60, help="of each seed (60)")
    add_kernels(parser)
    parser.add_argument("--heads", default="32/8", help="query/KV heads (32/8)")
    parser.add_argument("--head-dim", type=count, default=128, help="(128)")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="(bf16)")
    parser.add_argument("--page-size", type=count, default=1, help="(1)")
    parser.add_argument(
        "--pool-tokens", type=count, default=450_000,
        help="unique KV tokens of the largest batch (450000)",
    )  # fmt: skip
    parser.add_argument(
        "--json", type=output, metavar="OUT", help="result file, written after every seed"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
