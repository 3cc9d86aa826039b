"""What a server's policy would choose on batches whose kernels were measured one by one: none of
them made its calibration."""

import pytest

from eval.bench_kernel import over_floor
from eval.bench_kernel.trees import Tree
from eval.pages.results import load, rows
from sgl_prefix_attn.predict import store
from sgl_prefix_attn.predict.record import CalibrationKey
from sgl_prefix_attn.records import PREFIX, HeadConfig
from sgl_prefix_attn.step.evaluate import evaluate
from sgl_prefix_attn.step.policy import BatchFacts
from sgl_prefix_attn.tools.named_gpus import family_on, server_of

TABLES = ("kernel_h200_pat20", "kernel_h200_long", "kernel_h200_heads", "kernel_h200_64",
          "kernel_h200_e4m3", "kernel_h200_e4m3_256")  # fmt: skip
NUM_SMS, HOPPER = 132, (9, 0)


@pytest.mark.parametrize("name", TABLES)
def test_nothing_is_slower_than_flashinfer_by_policy(name):
    gpu = load(name)["meta"]["gpu"]
    for (heads, head_dim, _, dtype), trees in over_floor.group(rows(name)).items():
        kv_dtype = None if dtype == "bf16" else "float8_e4m3fn"
        config = HeadConfig(*map(int, heads.split("/")), head_dim)
        family = family_on(HOPPER, config, "bfloat16", "auto", kv_dtype=kv_dtype)
        key = CalibrationKey(gpu, family.name, config, kv_dtype or "bfloat16", 1)
        found = store.find(key, NUM_SMS, folders=store.Folders(None, store.SHIPPED))
        server = server_of(family, found.calibration)
        for tree, by in trees.items():
            ours, stock = by[over_floor.ours(by)]["us"], by["flashinfer"]["us"]
            paths = Tree.parse(tree).paths()
            _, decision = evaluate(paths, BatchFacts(), server.planner, server.predictor)
            case = name, heads, dtype, tree, ours, stock
            if decision.variant == PREFIX:
                assert ours <= 1.02 * stock, case
            else:
                assert stock <= 1.2 * ours, case
