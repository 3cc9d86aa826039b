"""Heads over latent KV: a token is one row, whose first elements are its value, too."""

import pytest
import torch

from sgl_prefix_attn.plan.kernel_rates import LatentRates
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.predict.record import CalibrationKey, rates_of
from sgl_prefix_attn.predict.startup import default_rates
from sgl_prefix_attn.predict.stock_time import KvCosts, stock_kernel
from sgl_prefix_attn.predict.store import Folders, find
from sgl_prefix_attn.records import HeadConfig, PathTable

MLA = HeadConfig(16, 1, 576, 512)
APART = HeadConfig(16, 1, 576)


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ((16, 2, 576, 512), r"latent_dim \(512\) is for one KV head, not 2"),
        ((16, 1, 576, 577), r"latent_dim \(577\).* at most head_dim \(576\)"),
        ((16, 1, 576, 0), "latent_dim must be a positive integer, got 0"),
    ],
)
def test_what_is_no_latent_row_is_refused(heads, message):
    with pytest.raises(ValueError, match=message):
        HeadConfig(*heads)


def test_a_token_is_read_once():
    assert (MLA.value_dim, MLA.token_dim) == (512, 576)
    assert (APART.value_dim, APART.token_dim) == (576, 1152)
    assert KvCosts.of(1e6, MLA, 2).token == KvCosts.of(1e6, APART, 2).token / 2
    assert str(MLA) == "16/1 heads of 576, 512 latent" and MLA.shape == "16-1-576-512"


def test_where_memory_bounds_a_step_it_takes_half_the_time():
    rates = LatentRates(item=0.0, l2=1e12, fixed=0.0, narrow=0.0, narrow_masked=0.0)
    paths = PathTable.of([], [], [-1] * 64, [4096] * 64)
    us = [Planner(h, num_sms=132, rates=rates, tile_rows=64).plan(paths) for h in (MLA, APART)]
    assert us[0].predicted_us == pytest.approx(us[1].predicted_us / 2, rel=0.01)


def test_stock_kernels_multiply_64_rows_however_few_heads_there_are():
    rows = [stock_kernel(HeadConfig(n, 1, 576, 512)).rows for n in (8, 16, 64, 128)]
    assert rows == [64, 64, 64, 128]


@pytest.mark.parametrize("family", ["hopper", "portable"])
def test_rates_of_other_heads_are_not_theirs(family, tmp_path):
    assert rates_of(family, MLA) is LatentRates and rates_of(family, APART) is not LatentRates
    found = default_rates(family, torch.device("cpu"), MLA, torch.bfloat16, 1)
    assert found == LatentRates()
    key = CalibrationKey("NVIDIA H20", family, MLA, "bfloat16", 1, fallback="fa3")
    shipped = find(key, 78, {}, Folders(None, Folders.default().shipped)).calibration
    assert shipped.source == "conservative" and type(shipped.kernel_rates) is LatentRates
    assert shipped.kernel_rates.narrow == LatentRates().narrow
