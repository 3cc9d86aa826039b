"""How sure row tiles' predicted times are on a GPU, and what they rest on."""

from dataclasses import replace

import numpy as np
import pytest

from sgl_prefix_attn.plan.costs import GPU_RATES
from sgl_prefix_attn.plan.row_tile_planner import RowTilePlanner
from sgl_prefix_attn.plan.row_tile_time import RowTileRates
from sgl_prefix_attn.predict.predictor import Predictor, RowTilePredictor
from sgl_prefix_attn.predict.row_tile_rates import row_tile_rates, row_tile_source
from sgl_prefix_attn.records import PathTable
from sgl_prefix_attn.step.policy import GAINS
from tests.support.calibrations import HEADS, KEY, NUM_SMS, calibration

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


def test_another_gpu_has_its_own_bandwidth():
    fitted = calibration()  # its rates are not those of its GPU's table
    assert row_tile_rates(fitted) == RowTileRates()
    other = replace(fitted, key=replace(KEY, gpu=OTHER), rates=GPU_RATES["H200"])
    ratio = GPU_RATES["H200"].bandwidth / GPU_RATES["H100"].bandwidth
    assert row_tile_rates(other) == replace(RowTileRates(), hbm=RowTileRates().hbm * ratio)


def test_wide_heads_have_rates_of_their_own():
    wide = replace(KEY, heads=replace(HEADS, head_dim=256))
    there = calibration(replace(wide, gpu=H200))
    assert row_tile_rates(there) != row_tile_rates(calibration(replace(KEY, gpu=H200)))
    here = calibration(wide)
    ratio = here.rates.bandwidth / GPU_RATES["H200"].bandwidth
    fitted = row_tile_rates(there)
    assert row_tile_rates(here) == replace(fitted, hbm=fitted.hbm * ratio)


@pytest.mark.parametrize(
    ("gpu", "source", "sure"),
    [
        (H200, "measured", "measured"),  # no batches held out were judged
        (H200, "conservative", "conservative"),
        (H100, "measured", "scaled"),
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
