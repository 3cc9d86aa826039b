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
from eval.arguments import several
from eval.policy_holdout import host, judgements, plot, text
from eval.policy_holdout.holdout import (
    DTYPES,
    Holdout,
    Setup,
    find_gpu,
    gpu_meter,
    summarise,
)
from sgl_prefix_attn.cli.argument_types import count

DEFAULTS = {
    "seeds": [101, 102, 103, 104, 105],
    "batches": 60,
    "heads": "32/8",
    "head_dim": 128,
    "dtype": "bf16",
    "page_size": 1,
    "pool_tokens": 450_000,
}


def main(argv: list[str]) -> int:
    """Exit status 1 only when no batch could be measured."""
    parser = _parser()
    args = parser.parse_args(argv)
    given = {name: getattr(args, name) for name in DEFAULTS if getattr(args, name) is not None}
    try:
        stored = provenance.load(args.stored) if args.stored else None
        setup = _new_setup(given) if stored is None else _stored_setup(stored, args.stored, given)
        holdout = Holdout(setup, args.calibration)
        sha256 = judgements.sha256(args.calibration, holdout.source.calibration)
        meta = _meta(argv, holdout, sha256, stored)
        again = None if stored is None else holdout.judge_again(stored["rows"])
        seen = args.stored or args.json  # a file that is replaced hands on its judgements too
        past = judgements.of_file(seen, setup.seeds) if seen else []
    except ValueError as error:
        parser.error(str(error))
    print(
        f"{setup.gpu}, {setup.heads} heads, head dim {setup.head_dim}, {setup.dtype}, pages of "
        f"{setup.page_size}; calibration: {holdout.source.origin}"
    )
    if stored is None:
        holdout.planner.warm_up()
        policy_us = host.policy_us(holdout.predictor, holdout.planner)
    else:
        policy_us = stored["summary"]["policy_us"]  # a measurement too
        print(f"measured {meta['measured']['date']}: {meta['measured']['command']}")
        if meta["calibration"]["rates"] != meta["measured"]["calibration"]["rates"]:
            print("prefix times are of plans made with other rates than this calibration's")

    def summary_of(rows: list[dict]) -> dict:
        judged = judgements.add(past, meta, rows, args.note)
        return summarise(rows, policy_us) | {"judgements": judged}

    def save(rows: list[dict]) -> None:
        if args.json:
            provenance.save(args.json, meta, rows, summary=summary_of(rows))

    if again is None:
        rows = holdout.run(gpu_meter(setup, holdout.planner), save)
    else:
        rows = again
        save(rows)
    summary = summary_of(rows)
    print("\n".join(text.lines(rows, summary)))
    if args.plot:
        plot.write(rows, args.plot)
    return 0 if summary["all"] else 1


def _new_setup(given: dict) -> Setup:
    gpu, num_sms = find_gpu()
    return Setup(gpu=gpu, num_sms=num_sms, **(DEFAULTS | given))


def _stored_setup(stored: dict, path: str, given: dict) -> Setup:
    if given:
        raise ValueError(f"--from takes {', '.join(given)} from the file: leave them out")
    setup = stored["meta"].get("setup")
    if setup is None or set(setup) != {field.name for field in fields(Setup)}:
        raise ValueError(f"{path} is no result of eval.policy_holdout")
    return Setup(**setup)


def _meta(argv: list[str], holdout: Holdout, sha256: str, stored: dict | None) -> dict:
    """Of stored measurements: what they were measured with, and "measured", the meta of the run
    that made them. Commit and date are always this run's; the command is the measuring one and
    this run's, which make the result again together."""
    meta = provenance.collect("eval.policy_holdout", argv)
    if stored is not None:
        before = stored["meta"]
        measured = before.get("measured", before)
        meta |= {name: before[name] for name in ("machine", "gpu", "driver", "versions")}
        meta |= {"measured": measured, "command": f"{measured['command']} && {meta['command']}"}
    calibration = holdout.source.meta | {"sha256": sha256}
    return meta | {"setup": asdict(holdout.setup), "calibration": calibration}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval.policy_holdout",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="default: what a server would use on this GPU",
    )
    parser.add_argument("--seeds", type=several(count), help="101,102,103,104,105; not below 101")
    parser.add_argument("--batches", type=count, help="of each seed (60)")
    parser.add_argument("--heads", help="query/KV heads (32/8)")
    parser.add_argument("--head-dim", type=count, help="(128)")
    parser.add_argument("--dtype", choices=DTYPES, help="(bf16)")
    parser.add_argument("--page-size", type=count, help="(1)")
    parser.add_argument(
        "--pool-tokens", type=count, help="unique KV tokens of the largest batch (450000)"
    )
    parser.add_argument("--json", metavar="OUT", help="result file, written after every seed")
    parser.add_argument(
        "--plot", metavar="OUT.png", help="predicted / measured, and regret by shared share"
    )
    parser.add_argument(
        "--from",
        dest="stored",
        metavar="OUT.json",
        help="judge these measurements again, without a GPU",
    )
    parser.add_argument(
        "--note", help="kept with this judgement: what changed since the batches were last judged"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
