"""python -m eval.other_heads SAMPLES... --json OUT: what a calibration is worth for other heads.

Each argument is the samples file of a calibration (`sgl-prefix-attn calibrate`), all of one GPU and
of different heads. A calibration fitted to each predicts the batches of all of them, and the policy
chooses by that with the gains of a shipped calibration. Needs no GPU; nothing is asserted.

error   root mean square of log(predicted / measured), bias their mean, of stock and prefix kernels
regret  time of the chosen kernels over that of the faster ones, geometric mean and worst
slower  batches that are slower than under stock kernels by more than they may be
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from eval import provenance
from eval.cli_values import output
from eval.policy_holdout.regret import figures
from eval.policy_holdout.rows import decided
from sgl_prefix_attn.calibrate.fit import PREFIX_MODEL, STOCK_MODEL, log_rms
from sgl_prefix_attn.calibrate.procedure import Measured, read_measured
from sgl_prefix_attn.plan.costs import CostModel
from sgl_prefix_attn.predict.codec import CalibrationError
from sgl_prefix_attn.records import Prediction
from sgl_prefix_attn.step.policy import BatchFacts, decide


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.other_heads", description=__doc__)
    parser.add_argument("samples", nargs="+", type=Path, metavar="SAMPLES")
    parser.add_argument("--json", type=output, metavar="OUT", help="result file")
    args = parser.parse_args(argv)
    try:
        measured = {heads_of(found): found for found in map(read_measured, args.samples)}
        gpus = {found.header.task.key.gpu for found in measured.values()}
        if len(gpus) > 1 or len(measured) < len(args.samples):
            raise ValueError("samples must be of one GPU and of different heads")
    except (CalibrationError, ValueError) as error:
        parser.error(str(error))
    rows = []
    for source, fitted in measured.items():
        stock = STOCK_MODEL.fit(fitted.stock_works, fitted.stock_us, fitted.costs)
        prefix = PREFIX_MODEL.fit(fitted.prefix_works, fitted.prefix_us, fitted.costs)
        for target, batches in measured.items():
            row = {"of": source, "for": target} | judge(batches, fitted, stock, prefix)
            rows.append(row)
            print(line(row), flush=True)
    if args.json:
        meta = provenance.collect("eval.other_heads", argv, sampled_on=gpus.pop())
        provenance.save(args.json, meta, rows)
    return 0


def heads_of(measured: Measured) -> str:
    heads = measured.header.task.key.heads
    return f"{heads.num_qo_heads}/{heads.num_kv_heads}"


def judge(batches: Measured, fitted: Measured, stock: dict, prefix: dict) -> dict:
    """Predict batches by the rates and coefficients of other heads, and choose by that. Their plans
    are those that were measured, made by their own rates."""
    key = batches.header.task.key
    costs = CostModel.from_rates(fitted.header.rates, key.heads, key.kv_bytes)
    stock_us = STOCK_MODEL.predict(stock, batches.stock_works, costs)
    prefix_us = PREFIX_MODEL.predict(prefix, batches.prefix_works, costs)
    rows = []
    for i, batch in enumerate(batches.batches):
        facts = BatchFacts(
            predicted=Prediction(float(stock_us[i]), float(prefix_us[i])),
            source="shipped",
            shares=batch.unique_tokens < batch.tokens,
        )
        measured = {
            "stock_us": float(batches.stock_us[i]),
            "prefix_us": float(batches.prefix_us[i]),
        }
        counts = {"tokens": batch.tokens, "unique": batch.unique_tokens}
        rows.append(measured | counts | decided(decide(facts)))
    all_rows = figures(rows)
    return {
        "batches": len(rows),
        "stock error": log_rms(stock_us, batches.stock_us),
        "stock bias": float(np.exp(np.log(stock_us / batches.stock_us).mean())),
        "prefix error": log_rms(prefix_us, batches.prefix_us),
        "prefix bias": float(np.exp(np.log(prefix_us / batches.prefix_us).mean())),
        "regret": all_rows["regret"],
        "worst": all_rows["worst"],
        "slower": all_rows["slower"] + all_rows["unshared_slower"],
    }


def line(row: dict) -> str:
    return (
        f"{row['of']:>5} for {row['for']:5}  stock error {row['stock error']:.3f}, bias "
        f"{row['stock bias']:.3f}  prefix {row['prefix error']:.3f}, {row['prefix bias']:.3f}  "
        f"regret {row['regret']:.4f}, worst {row['worst']:.2f}, slower {row['slower']} of "
        f"{row['batches']}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
