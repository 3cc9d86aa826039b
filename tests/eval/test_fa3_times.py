"""The time model of FlashAttention 3's decode, fitted to its times in eval/results."""

import numpy as np
import pytest

from eval.bench_kernel.trees import Tree
from eval.pages.results import rows
from sgl_prefix_attn.predict.stock_time import (
    KvCosts,
    stock_physical,
    stock_start,
    stock_work,
)
from sgl_prefix_attn.records import HeadConfig
from sgl_prefix_attn.tools.calibrate.fit import cross_validate, fit_stock, log_rms

HEADS, NUM_SMS = HeadConfig(32, 8, 128), 132
# Bytes/us of the shipped calibrations, and batches of many lengths, shared or not.
GPUS = {
    "h100": (2.92e6, ("kernel_h100_row_tiles", "kernel_h100_long")),
    "h200": (4.06e6, ("kernel_h200_pat20", "kernel_h200_long")),
}


def measured(files):
    """Lengths, unique tokens and microseconds of each tree that FA3 was timed on."""
    found = {}
    for name in files:
        for row in rows(name):
            if row["provider"] == "fa3" and row.get("us") and row["heads"] == "32/8":
                tree = Tree.parse(row["tree"])
                lens = np.full(tree.counts[-1], sum(tree.lengths), np.int64)
                found[row["tree"]] = lens, tree.unique_tokens, row["us"]
    assert len(found) >= 20
    return found.values()


@pytest.mark.parametrize("gpu", GPUS)
def test_it_describes_what_was_measured(gpu):
    bandwidth, files = GPUS[gpu]
    costs, batches = KvCosts.of(bandwidth, HEADS, 2), list(measured(files))
    us = np.array([us for _, _, us in batches])
    errors = {}
    for kind in ("flashinfer", "fa3"):
        works = [stock_work(lens, unique, NUM_SMS, HEADS, kind) for lens, unique, _ in batches]
        start = stock_start(HEADS, kind)

        def fit(seen, works=works, start=start):
            return fit_stock([works[i] for i in seen], us[seen], costs, start).values()

        held_out = cross_validate(
            fit, lambda c, i, works=works: stock_physical(c, works[i], costs), len(works)
        )
        guess = [stock_physical(start.values(), work, costs) for work in works]
        errors[kind] = log_rms(np.array(held_out), us), log_rms(np.array(guess), us)
    assert errors["fa3"][0] < 0.05, errors
    assert errors["fa3"][0] < 0.9 * errors["flashinfer"][0], "its own way to split is nearer"
    assert errors["fa3"][1] < 0.15, "what it starts from is no wild guess"
