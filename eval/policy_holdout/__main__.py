"""python -m eval.policy_holdout [--json OUT]: what the policy's choices cost on held-out batches.

The calibration is fixed on its own seeds. Batches of other seeds are measured with both kernels
(CUDA graphs, cold L2), predicted and decided as a server does. Regret is the time of the chosen
kernels over the time of the faster ones. Exit status 0 whatever the numbers are.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, fields
from pathlib import Path

from eval import provenance
from eval.cli_values import output, several
from eval.policy_holdout import host, policy_text, scatter
from eval.policy_holdout.coverage import coverage
from eval.policy_holdout.holdout import DTYPES, Holdout, Setup, find_gpu, gpu_meter, settled
from eval.policy_holdout.regret import summarize
from sgl_prefix_attn.cli.argument_types import count
from sgl_prefix_attn.cli.named_gpus import KERNELS
from sgl_prefix_attn.execute.backends.family import AUTO, TRITON

DEFAULTS = {
    "batches": 60,
    "kernels": AUTO,
    "heads": "32/8",
    "head_dim": 128,
    "dtype": "bf16",
    "page_size": 1,
    "pool_tokens": 450_000,
}


def main(argv: list[str]) -> int:
    """Return 1 only when no batch could be measured."""
    parser = _parser()
    args = parser.parse_args(argv)
    if not (args.seeds or args.stored):
        parser.error("argument --seeds is needed, unless --from has them")
    names = ("seeds", *DEFAULTS)
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    try:
        stored = provenance.load(args.stored) if args.stored else None
        if stored is None:
            setup = settled(Setup(*find_gpu(), **DEFAULTS | given))
        else:
            setup = _stored_setup(stored, args.stored, given)
        holdout = Holdout(setup, args.calibration)
        meta = _meta(argv, holdout, stored)
        rows = [] if stored is None else holdout.judge_again(stored["rows"])
    except ValueError as error:
        parser.error(str(error))
    print(
        f"{setup.gpu}, {setup.kernels}, {setup.heads} heads, head dim {setup.head_dim}, "
        f"{setup.dtype}, pages of {setup.page_size}; calibration: {meta['calibration']['origin']}"
    )
    if stored is None:
        holdout.planner.warm_up()
        policy_us = host.policy_us(holdout.predictor, holdout.planner)
    else:
        policy_us = stored["summary"]["policy_us"]  # a measurement too
        print(f"measured {meta['measured']['date']}: {meta['measured']['command']}")
        if meta["calibration"]["rates"] != meta["measured"]["calibration"]["rates"]:
            print("prefix times are of plans made with other rates than this calibration's")

    def save(rows: list[dict]) -> dict:
        summary = summarize(rows) | {"coverage": coverage(rows), "policy_us": policy_us}
        if args.json:
            provenance.save(args.json, meta, rows, summary=summary)
        return summary

    if stored is None:
        rows = holdout.run(gpu_meter(setup, holdout.planner), save)
    summary = save(rows)
    print(policy_text.report(rows, summary))
    if args.plot:
        scatter.write(rows, args.plot)
    return 0 if summary["all"] else 1


def _stored_setup(stored: dict, path: str, given: dict) -> Setup:
    if given:
        raise ValueError(f"--from takes {', '.join(given)} from the file: leave them out")
    # Files from before the option are of packs.
    setup = {"kernels": TRITON} | (stored["meta"].get("setup") or {})
    if set(setup) != {field.name for field in fields(Setup)}:
        raise ValueError(f"{path} is no result of eval.policy_holdout")
    return Setup(**setup)


def _meta(argv: list[str], holdout: Holdout, stored: dict | None) -> dict:
    """Tell where rows come from. Those judged again keep the machine and versions that they were
    measured with, and "measured", the meta of that run; its command and this run's make the result
    again together."""
    meta = provenance.collect("eval.policy_holdout", argv)
    if stored is not None:
        before = stored["meta"]
        measured = before.get("measured", before)
        meta |= {name: before[name] for name in ("machine", "gpu", "driver", "versions")}
        meta |= {"measured": measured, "command": f"{measured['command']} && {meta['command']}"}
    return meta | {"setup": asdict(holdout.setup), "calibration": holdout.calibration_meta()}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m eval.policy_holdout", description=__doc__)
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="default: what a server would use on this GPU",
    )
    parser.add_argument(
        "--seeds", type=several(count), help="that nothing was chosen by; not below 101"
    )
    parser.add_argument("--batches", type=count, help="of each seed (60)")
    parser.add_argument("--kernels", choices=KERNELS, help="of prefix steps (auto: a server's)")
    parser.add_argument("--heads", help="query/KV heads (32/8)")
    parser.add_argument("--head-dim", type=count, help="(128)")
    parser.add_argument("--dtype", choices=DTYPES, help="(bf16)")
    parser.add_argument("--page-size", type=count, help="(1)")
    parser.add_argument(
        "--pool-tokens", type=count, help="unique KV tokens of the largest batch (450000)"
    )
    parser.add_argument(
        "--json", type=output, metavar="OUT", help="result file, written after every seed"
    )
    parser.add_argument(
        "--plot",
        type=output,
        metavar="OUT.png",
        help="predicted / measured, and regret by shared share",
    )
    parser.add_argument(
        "--from",
        dest="stored",
        metavar="OUT.json",
        help="judge these measurements again, without a GPU",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
