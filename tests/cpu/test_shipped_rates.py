"""Rates in the shipped files are the fits of cuts that were timed, and still describe them."""

import lzma
from pathlib import Path

import numpy as np
import orjson
import pytest

from eval import provenance
from sgl_prefix_attn.plan.cut_time import part_costs, predict_us
from sgl_prefix_attn.plan.kernel_rates import KernelRates
from sgl_prefix_attn.plan.tiles import B_MASKED, B_UNMASKED, Tiles
from sgl_prefix_attn.predict import store
from sgl_prefix_attn.predict.record import CalibrationKey
from sgl_prefix_attn.records import HeadConfig
from sgl_prefix_attn.tools.calibrate.fit import log_rms

RESULTS = Path(__file__).resolve().parents[2] / "eval" / "results"
SHIPPED = store.Folders(None, store.SHIPPED)
NUM_SMS = 132
H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
FITS = {"h100": (H100, 128), "h200": (H200, 128), "h100_256": (H100, 256)}


def shipped(gpu: str, heads: HeadConfig) -> KernelRates:
    key = CalibrationKey(gpu, "hopper", heads, "bfloat16", 1)
    return store.find(key, NUM_SMS, {}, SHIPPED).calibration.kernel_rates


def predicted_us(cut: dict, heads: HeadConfig, rates: KernelRates) -> float:
    edge = np.cumsum([0, *cut["queries"]]).astype(np.int32)
    blocks = np.zeros((edge.size - 1, 5), np.int32)
    blocks[:, B_UNMASKED], blocks[:, B_MASKED] = cut["unmasked"], cut["masked"]
    tiles = Tiles(edge, np.zeros_like(edge), np.zeros((0, 5), np.int32), blocks)
    query, parts = np.arange(edge[-1], dtype=np.int32), np.array(cut["parts"])
    costs = part_costs(tiles, heads, rates)
    return predict_us(
        tiles, query, costs, parts, cut["unique_tokens"], heads, cut["num_sms"], rates
    )


@pytest.mark.parametrize("name", FITS)
def test_shipped_rates_are_those_of_the_fit(name):
    gpu, head_dim = FITS[name]
    fitted = provenance.load(RESULTS / f"row_tile_fit_{name}.json")["rates"]
    for heads in (HeadConfig(32, 8, head_dim), HeadConfig(16, 8, head_dim)):
        assert vars(shipped(gpu, heads)) == pytest.approx(fitted, rel=1e-3)
    assert (shipped(gpu, heads) == KernelRates()) == (name == "h100")


@pytest.mark.parametrize("name", FITS)
def test_shipped_rates_describe_the_cuts_that_they_are_fitted_to(name):
    """A change of the formula needs new rates."""
    gpu, head_dim = FITS[name]
    rows = provenance.load(RESULTS / f"row_tile_fit_{name}.json")["rows"]
    cuts: dict[str, list[dict]] = {}
    for line in lzma.open(RESULTS / f"row_tile_fit_{name}.jsonl.xz"):
        cut = orjson.loads(line)
        assert (cut["gpu"], cut["head_dim"], cut["num_sms"]) == (gpu, head_dim, NUM_SMS)
        cuts.setdefault(cut["heads"], []).append(cut)
    assert {row["heads"]: row["samples"] for row in rows} == {
        heads: len(mine) for heads, mine in cuts.items()
    }
    for row in rows:
        heads = HeadConfig(*map(int, row["heads"].split("/")), head_dim)
        rates, mine = shipped(gpu, heads), cuts[row["heads"]]
        predicted = np.array([predicted_us(cut, heads, rates) for cut in mine])
        error = log_rms(predicted, np.array([cut["us"] for cut in mine]))
        assert error == pytest.approx(row["error of all"], abs=0.001), row["heads"]
