"""How sure row tiles' predicted times are on a GPU, and what they rest on."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eval import provenance
from sgl_prefix_attn.plan.costs import GPU_RATES
from sgl_prefix_attn.plan.row_tile_planner import RowTilePlanner
from sgl_prefix_attn.plan.row_tile_time import RowTileRates
from sgl_prefix_attn.predict.predictor import Predictor, RowTilePredictor
from sgl_prefix_attn.predict.row_tile_rates import row_tile_rates, row_tile_source
from sgl_prefix_attn.records import HeadConfig, PathTable
from sgl_prefix_attn.step.policy import GAINS
from tests.support.calibrations import HEADS, KEY, NUM_SMS, calibration

RESULTS = Path(__file__).resolve().parents[2] / "eval" / "results"
H100, H200, OTHER = KEY.gpu, "NVIDIA H200", "NVIDIA GH200 480GB"


@pytest.mark.parametrize(
    ("gpu", "num_sms", "source", "sure"),
    [
        (H100, 132, "measured", "judged"),
        (H200, 132, "measured", "judged"),
        (H100, 132, "shipped", "judged"),
        (H200, 132, "shipped", "judged"),
        (H100, 132, "scaled", "scaled"),
        (H200, 132, "scaled", "scaled"),
        (H200, 120, "measured", "conservative"),
        (OTHER, 132, "measured", "scaled"),
        (OTHER, 132, "conservative", "conservative"),
        ("NVIDIA H20", 78, "measured", "conservative"),
        (H100, 120, "measured", "conservative"),
    ],
)
def test_two_predicted_times_are_as_sure_as_the_less_sure(gpu, num_sms, source, sure):
    found = calibration(replace(KEY, gpu=gpu), num_sms=num_sms, source=source)
    assert row_tile_source(found) == RowTilePredictor(found).source == sure
    assert sure in GAINS


@pytest.mark.parametrize("head_dim", [128, 256])
def test_another_gpu_has_its_own_bandwidth(head_dim):
    fitted = calibration(replace(KEY, heads=replace(HEADS, head_dim=head_dim)))
    rates = row_tile_rates(fitted)
    assert (rates == RowTileRates()) == (head_dim == 128)
    # a fit's rates are not those of its GPU's table
    other = replace(fitted, key=replace(fitted.key, gpu=OTHER), rates=GPU_RATES["H200"])
    ratio = GPU_RATES["H200"].bandwidth / GPU_RATES["H100"].bandwidth
    found = row_tile_rates(other)
    assert found.hbm == pytest.approx(rates.hbm * ratio)
    assert found == replace(rates, hbm=found.hbm)


@pytest.mark.parametrize(
    ("gpu", "head_dim", "name"),
    [(H100, 128, "h100"), (H200, 128, "h200"), (H100, 256, "h100_256"), (H200, 256, "h200_256")],
)
def test_rates_are_those_of_the_fit_in_the_repository(gpu, head_dim, name):
    fitted = provenance.load(RESULTS / f"row_tile_fit_{name}.json")["rates"]
    found = row_tile_rates(calibration(replace(KEY, gpu=gpu, heads=HeadConfig(16, 4, head_dim))))
    assert vars(found) == pytest.approx(fitted, rel=1e-3)


def test_wide_heads_have_rates_of_their_own_on_every_gpu():
    wide = replace(KEY, heads=replace(HEADS, head_dim=256))
    keys = [KEY, wide, replace(KEY, gpu=H200), replace(wide, gpu=H200)]
    assert len({row_tile_rates(calibration(key)) for key in keys}) == 4


@pytest.mark.parametrize(
    ("gpu", "source", "sure"),
    [
        (H100, "shipped", "shipped"),  # rates are measured, not judged
        (H200, "measured", "measured"),
        (H200, "scaled", "scaled"),
        (OTHER, "measured", "scaled"),
    ],
)
def test_how_sure_times_of_wide_heads_are(gpu, source, sure):
    key = replace(KEY, gpu=gpu, heads=replace(HEADS, head_dim=256))
    assert row_tile_source(calibration(key, source=source)) == sure


def test_stock_times_are_the_calibrations_and_prefix_times_the_planners():
    predictor = RowTilePredictor(calibration())
    lens = np.array([700, 800])
    assert predictor.stock(lens, 900) == Predictor(calibration()).stock(lens, 900)
    plan = RowTilePlanner(HEADS, num_sms=NUM_SMS).plan(PathTable.smallest_shared())
    assert predictor.prefix(plan) == plan.predicted_us > 0
