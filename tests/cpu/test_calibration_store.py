"""Calibration files: exact, whole or refused, and found in the right order."""

import functools
import os
from dataclasses import replace
from datetime import date
from pathlib import Path

import msgspec
import numpy as np
import pytest

from sgl_prefix_attn.plan.kernel_rates import KernelRates, LatentRates, PortableRates
from sgl_prefix_attn.predict import stock_time, store
from sgl_prefix_attn.predict.bandwidths import usual_bandwidth
from sgl_prefix_attn.predict.codec import CalibrationError, decode, encode
from sgl_prefix_attn.predict.predictor import Predictor
from sgl_prefix_attn.predict.record import CalibrationKey, Origin, rates_of
from sgl_prefix_attn.predict.stock_time import stock_physical
from sgl_prefix_attn.predict.store import Folders, file_name, find, load
from sgl_prefix_attn.records import FLASHINFER, HeadConfig
from sgl_prefix_attn.step.policy import GAINS
from sgl_prefix_attn.tools.calibrate import procedure
from sgl_prefix_attn.tools.calibrate.batches import draw
from sgl_prefix_attn.tools.calibrate.writing import save
from tests.support.calibrations import KEY, NUM_SMS, ORIGIN, VERSIONS, calibration, stock_start

RESULTS = Path(__file__).resolve().parents[2] / "eval" / "results"
OTHER_HEADS = replace(KEY, heads=HeadConfig(32, 8, 128))
H100, H200 = KEY.gpu, "NVIDIA H200"
SHIPPED = Folders(None, store.SHIPPED)


@pytest.fixture
def folders(tmp_path):
    found = Folders(tmp_path / "cache", tmp_path / "shipped")
    found.cache.mkdir()
    found.shipped.mkdir()
    return found


def put_in_cache(folders, **options):
    given = calibration(**options)
    save(given, folders.cache / file_name(given.key))
    return given


def put_in_shipped(folders, name, **options):
    save(calibration(**options), folders.shipped / name)


def test_a_round_trip_is_exact(tmp_path):
    given = calibration()
    save(given, tmp_path / "new" / "x.json")
    assert load(tmp_path / "new" / "x.json", KEY) == given


def test_a_round_trip_of_latent_heads(folders):
    key = replace(KEY, heads=HeadConfig(16, 1, 576, 512))
    given = put_in_cache(folders, key=key)
    assert load(folders.cache / file_name(key), key) == given
    assert type(given.kernel_rates) is LatentRates
    assert file_name(key) != file_name(replace(KEY, heads=HeadConfig(16, 1, 576)))


def test_shipped_files_are_written_as_they_were():
    for path in store.SHIPPED.glob("*.json"):
        assert encode(load(path)) == path.read_bytes().strip()


def changed(path: str, value):
    """The example's JSON with one field set, or removed where value is ...; path is dotted."""
    fields = msgspec.json.decode(encode(calibration()))
    *parents, last = path.split(".")
    at = functools.reduce(dict.__getitem__, parents, fields)
    at[last] = value
    if value is ...:
        del at[last]
    return msgspec.json.encode(fields)


REFUSED = {
    "format": (changed("format", 3), "format 3, this version reads 4: calibrate again"),
    "of 0.1.2": (changed("format", 2), "format 2, this version reads 4: calibrate again"),
    "no format": (changed("format", ...), "format None"),
    "truncated": (encode(calibration())[:-40], "truncated"),
    "nested": (b'{"format":' + b"[" * 100_000, "nested too deeply"),
    "no object": (b"[1]", "object"),
    "foreign": (b'{"format": 4, "name": "x"}', "missing required field `key`"),
    "pickle": (b"\x80\x04N.", "JSON is malformed"),
    "no UTF-8": (b'{"\xff": 1}', "utf-8"),
    "bandwidth": (changed("bandwidth", -1.0), "bandwidth"),
    "rate": (changed("rates.hbm", 0.0), r"\$\.rates"),
    "rate of text": (changed("rates.item", "2"), r"\$\.rates"),
    "unknown rate": (changed("rates.speed", 1.0), "rates: .* are not this version's"),
    "rate missing": (changed("rates.wide", ...), "rates: .* are not this version's"),
    "coefficient null": (changed("stock.launch", None), r"\$\.stock"),
    "coefficient far out": (changed("stock.norm", 0.0), "stock norm"),
    "coefficient missing": (changed("stock.split", ...), "stock: coefficients"),
    "coefficient too many": (changed("stock.x", 1.0), "stock: coefficients"),
    "no coefficients": (changed("stock", ...), "missing required field `stock`"),
    "no rates": (changed("rates", ...), "missing required field `rates`"),
    "family": (changed("key.family", "packs"), r"'packs' - at `\$\.key\.family"),
    "no family": (changed("key.family", ...), "missing required field `family`"),
    "heads": (changed("key.heads.num_kv_heads", 3), "multiple"),
    "dtype": (changed("key.dtype", "int8"), r"'int8' - at `\$\.key\.dtype"),
    "no gpu": (changed("key.gpu", ""), r"key\.gpu"),
    "page size": (changed("key.page_size", 0), "page_size"),
    "kernels": (changed("key.kernels", 0), "kernels"),
    "no kernels": (changed("key.kernels", ...), "key: more or fewer fields"),
    "num_sms": (changed("num_sms", 1.5), "num_sms"),
    "samples": (changed("samples", -1), r"\$\.samples"),
    "error": (changed("errors.stock", -0.1), r"\$\.errors"),
    "another error": (changed("errors.packs", 0.1), r"\$\.errors"),
    "versions": (changed("versions.torch", 2), "versions"),
    "source": (changed("source", "guess"), r"\$\.source"),
    "origin": (changed("origin", ...), "missing required field `origin`"),
    "seed": (changed("origin.seed", -1), "seed"),
    "batches": (changed("origin.batches", 0), "batches"),
    "pool tokens": (changed("origin.pool_tokens", "9"), "pool_tokens"),
    "date": (changed("origin.date", "2026-13-01"), r"date - at `\$\.origin\.date"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_file_and_reason(name, tmp_path):
    data, reason = REFUSED[name]
    path = tmp_path / "bad.json"
    path.write_bytes(data)
    with pytest.raises(CalibrationError, match=reason) as error:
        load(path)
    assert str(error.value).startswith(f"{path}: ")


def test_refused_for_another_key(tmp_path):
    save(calibration(), tmp_path / "x.json")
    with pytest.raises(CalibrationError, match="it is for .*num_qo_heads=8"):
        load(tmp_path / "x.json", OTHER_HEADS)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(CalibrationError, match="No such file"):
        load(tmp_path / "x.json")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_not_written(value, tmp_path):
    bad = calibration()
    bad.errors["stock"] = value
    with pytest.raises(CalibrationError, match="errors"):
        save(bad, tmp_path / "x.json")
    assert not list(tmp_path.iterdir())


def test_a_crash_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    save(calibration(), path)

    def crash(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        save(calibration(num_sms=7), path)
    assert load(path).num_sms == NUM_SMS
    assert list(tmp_path.iterdir()) == [path]


def test_a_server_of_another_user_may_read_it(tmp_path):
    (tmp_path / "plain").touch()
    save(calibration(), tmp_path / "x.json")
    assert (tmp_path / "x.json").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_file_names_are_readable_and_differ_in_all_that_matters():
    assert file_name(KEY) == "NVIDIA-H100-80GB-HBM3_8-2-64_bfloat16_page1_hopper_kernels1.json"
    others = [
        replace(KEY, gpu="NVIDIA H100 PCIe"),
        replace(KEY, family="portable"),
        replace(KEY, heads=HeadConfig(8, 4, 64)),
        replace(KEY, dtype="float16"),
        replace(KEY, page_size=16),
        replace(KEY, kernels=2),
    ]
    assert len({file_name(key) for key in (KEY, *others)}) == 7


def test_the_cache_folder_follows_xdg(tmp_path):
    wanted = tmp_path / "sgl_prefix_attn" / "calibration"
    assert store.cache_folder({"XDG_CACHE_HOME": str(tmp_path)}) == wanted
    assert store.cache_folder({"XDG_CACHE_HOME": ""}).parts[-3] == ".cache"


def test_without_a_home_the_shipped_files_are_used(folders, no_home, monkeypatch, tmp_path):
    put_in_shipped(folders, "a.json")
    monkeypatch.setattr(store, "SHIPPED", folders.shipped)
    assert store.cache_folder() is None
    found = find(KEY, NUM_SMS, VERSIONS)
    assert found.calibration.source == "shipped" and "a.json" in found.message
    assert store.cache_folder({"XDG_CACHE_HOME": str(tmp_path)}) is not None


def test_versions_of_what_is_missing_are_absent(monkeypatch):
    monkeypatch.setattr(store, "_PACKAGES", ("msgspec", "no-such-package"))
    assert store.versions() == {"msgspec": msgspec.__version__, "no-such-package": "absent"}


def test_the_cache_comes_first(folders):
    given = put_in_cache(folders)
    put_in_shipped(folders, "a.json")
    found = find(KEY, NUM_SMS, VERSIONS, folders)
    assert found.calibration == given
    assert f"{file_name(KEY)}, {ORIGIN})" in found.message
    assert "measured" in found.message and "sgl-prefix-attn calibrate" not in found.message


def test_the_version_of_this_package_is_no_part_of_what_is_compared():
    assert set(store.versions()) == {"torch", "triton", "flashinfer-python", "sglang"}


OTHERS = "measured with other versions: triton 3.0, not 3.6.0; `sgl-prefix-attn calibrate --model"


def test_a_measurement_with_other_versions_is_used_with_a_warning(folders):
    given = put_in_cache(folders, versions=VERSIONS | {"triton": "3.0", "sgl-prefix-attn": "0.1.2"})
    put_in_shipped(folders, "a.json")
    found = find(KEY, NUM_SMS, VERSIONS, folders)
    assert (found.calibration, found.warning) == (given, True) and OTHERS in found.message
    assert not find(KEY, NUM_SMS, VERSIONS | {"triton": "3.0"}, folders).warning


def test_of_several_measurements_the_one_of_these_versions_then_the_latest(folders):
    for name, versions, day in (
        ("a", {"torch": "1"}, 3), ("b", VERSIONS, 1), ("c", VERSIONS, 2), ("d", {}, 4)
    ):  # fmt: skip
        origin = replace(ORIGIN, date=date(2026, 11, day))
        given = replace(calibration(versions=versions), origin=origin)
        save(given, folders.cache / file_name(KEY).replace("hopper_kernels1", name))
    found = find(KEY, NUM_SMS, VERSIONS, folders)
    assert "page1_c.json" in found.message and not found.warning


def test_then_a_shipped_file_of_any_versions(folders):
    put_in_shipped(folders, "a.json", versions=VERSIONS | {"triton": "3.0"})
    found = find(KEY, NUM_SMS, VERSIONS, folders)
    wanted = calibration(versions=VERSIONS | {"triton": "3.0"}, source="shipped")
    assert (found.calibration, found.warning) == (wanted, True)
    assert not find(KEY, NUM_SMS, wanted.versions, folders).warning
    assert "a.json (100 batches of seed 3 on 2026-11-20); " + OTHERS in found.message


@pytest.mark.parametrize(("number", "end"), [(2, "62ecf6f3"), (3, "kernels1")])
def test_a_file_of_an_earlier_version_is_named_with_what_to_do(number, end, folders):
    """Under the name that it got there: 0.1.2's has a digest of versions at its end."""
    path = folders.cache / file_name(KEY).replace("hopper_kernels1", end)
    path.write_bytes(changed("format", number))
    found = find(KEY, NUM_SMS, VERSIONS, folders)
    assert found.calibration.source == "conservative" and found.warning
    wanted = f"refused {path}: format {number}, this version reads 4: calibrate again"
    assert wanted in found.message
    assert "sgl-prefix-attn calibrate --model" in found.message


def test_what_is_refused_is_not_named_where_a_measurement_is_found(folders):
    put_in_cache(folders)
    put_in_cache(folders, key=replace(KEY, kernels=2))
    found = find(KEY, NUM_SMS, VERSIONS, folders)
    assert found.calibration.source == "measured" and "; refused" not in found.message


def test_a_measurement_of_the_other_kernels_of_this_gpu_is_left_alone(folders):
    put_in_cache(folders, key=replace(KEY, family="portable"))
    found = find(KEY, NUM_SMS, VERSIONS, folders)
    assert found.calibration.source == "conservative" and "; refused" not in found.message
    given = put_in_cache(folders)
    assert find(KEY, NUM_SMS, VERSIONS, folders).calibration == given


@pytest.mark.parametrize(
    ("fallback", "do"),
    [("fa3", "`sgl-prefix-attn calibrate --fallback fa3 "), ("triton", "triton cannot be calib")],
)
def test_what_was_measured_beside_another_fallback_decides_nothing(fallback, do, folders):
    """As on a GPU that nothing is known of; but rates of our kernels hold whatever is beside."""
    flashinfers, key = put_in_cache(folders), replace(KEY, fallback=fallback)
    put_in_shipped(folders, "a.json")
    found = find(key, NUM_SMS, VERSIONS, folders)
    got = found.calibration
    assert (got.key, got.source, got.samples) == (key, "conservative", 0) and found.warning
    assert f"nothing of {fallback} is measured on {KEY.gpu}" in found.message
    assert do in found.message and "; refused" not in found.message
    assert got.stock != flashinfers.stock and got.rates == flashinfers.rates
    assert got.bandwidth == usual_bandwidth(KEY.gpu)
    own = put_in_cache(folders, key=key)
    assert own.key.fallback == fallback != flashinfers.key.fallback
    assert find(key, NUM_SMS, VERSIONS, folders).calibration == own
    assert find(KEY, NUM_SMS, VERSIONS, folders).calibration == flashinfers


@pytest.mark.parametrize(
    "options",
    [
        {"heads": HeadConfig(16, 1, 576, 512)},  # FlashInfer is not beside them
        {"dtype": "float8_e4m3fn", "fallback": "fa3"},
        {"dtype": "float32"},
    ],
)
def test_nobody_is_told_to_calibrate_what_the_command_does_not_take(options, folders):
    key = replace(KEY, **options)
    message = find(key, NUM_SMS, VERSIONS, folders).message
    assert message.endswith(f"; {key.heads} with KV of {key.dtype} cannot be calibrated")
    assert "sgl-prefix-attn calibrate" not in message


def test_a_file_that_names_no_fallback_is_flashinfers():
    data = encode(calibration())
    assert b"fallback" not in data and decode(data).key.fallback == "flashinfer"
    assert b'"fallback":"fa3"' in encode(calibration(key=replace(KEY, fallback="fa3")))


def test_times_of_fa3_carry_over_to_all_heads_of_a_dim(folders):
    """Its kernel is the same whatever the group."""
    key = replace(OTHER_HEADS, fallback="fa3")
    put_in_shipped(folders, "a.json", key=key)
    for heads, source in (((16, 8, 128), "shipped"), ((32, 8, 64), "conservative")):
        found = find(replace(key, heads=HeadConfig(*heads)), NUM_SMS, VERSIONS, folders)
        assert found.calibration.source == source


def test_a_shipped_file_of_the_page_size_comes_before_another(folders):
    put_in_shipped(folders, "a.json", key=replace(KEY, page_size=64), versions={"x": "64"})
    put_in_shipped(folders, "b.json", key=replace(KEY, page_size=16), versions={"x": "16"})
    for page_size, wanted in ((64, "64"), (16, "16"), (1, "16")):
        key = replace(KEY, page_size=page_size)
        found = find(key, NUM_SMS, VERSIONS, folders)
        assert found.calibration.versions == {"x": wanted}
        assert (found.calibration.key, found.calibration.source) == (key, "shipped")
        assert ("for pages of 16" in found.message) is (page_size == 1)


def of_wider_blocks(rates, ratio):
    """Half of a block's time is as long whatever its dimensions, and it is counted by them."""
    blocks = "wide", "narrow", "wide_masked", "narrow_masked"
    return rates | {name: rates[name] * (1 + ratio) / 2 for name in blocks}


def test_then_the_rates_of_the_same_gpu_for_other_heads(folders):
    put_in_shipped(folders, "far.json", key=replace(OTHER_HEADS, heads=HeadConfig(64, 1, 256)))
    put_in_shipped(folders, "near.json", key=OTHER_HEADS)
    found = find(KEY, NUM_SMS, VERSIONS, folders)
    got, given = found.calibration, calibration()
    assert (got.key, got.source, got.samples, got.errors) == (KEY, "conservative", 0, {})
    assert (got.bandwidth, got.stock) == (given.bandwidth, given.stock)
    assert got.rates == of_wider_blocks(given.rates, 128 / KEY.heads.head_dim)
    assert f"near.json ({ORIGIN}), for 32/8 heads of 128" in found.message
    assert got.origin == ORIGIN


@pytest.mark.parametrize(
    ("there", "heads", "source"),
    [
        (HeadConfig(32, 8, 128), HeadConfig(28, 4, 128), "shipped"),
        (HeadConfig(32, 8, 128), HeadConfig(64, 16, 128), "shipped"),
        (HeadConfig(32, 8, 128), HeadConfig(16, 1, 128), "shipped"),
        (HeadConfig(32, 8, 128), HeadConfig(17, 1, 128), "conservative"),  # more rows a CTA
        (HeadConfig(32, 8, 128), HeadConfig(32, 8, 64), "conservative"),
        (HeadConfig(32, 8, 128), HeadConfig(24, 8, 128), "conservative"),  # no tensor cores
        (HeadConfig(16, 8, 128), HeadConfig(4, 2, 128), "shipped"),
        (HeadConfig(16, 8, 128), HeadConfig(8, 8, 128), "conservative"),
        (HeadConfig(16, 8, 128), HeadConfig(24, 8, 128), "conservative"),
    ],
)
def test_a_calibration_carries_over_to_heads_alike(there, heads, source, folders):
    put_in_shipped(folders, "a.json", key=replace(OTHER_HEADS, heads=there))
    found = find(replace(OTHER_HEADS, heads=heads), NUM_SMS, VERSIONS, folders)
    got = found.calibration
    assert (got.source, got.key.heads, got.samples) == (source, heads, 0)
    name = f"{there.num_qo_heads}/{there.num_kv_heads} heads of 128"
    assert f"{source}: a.json ({ORIGIN}), for {name}" in found.message
    another = replace(OTHER_HEADS, heads=heads, dtype="float16")
    source = "scaled" if source == "shipped" else source
    assert find(another, NUM_SMS, VERSIONS, folders).calibration.source == source


@pytest.mark.parametrize(
    ("elsewhere", "heads", "source"),
    [
        ({"heads": HeadConfig(32, 32, 128)}, HeadConfig(16, 16, 128), "scaled"),
        ({"heads": HeadConfig(32, 8, 64)}, HeadConfig(64, 8, 64), "scaled"),
        ({"heads": HeadConfig(32, 16, 64)}, HeadConfig(64, 8, 64), None),
        ({"heads": HeadConfig(32, 8, 64), "kernels": 2}, HeadConfig(64, 8, 64), None),
        # unlike, but of the decode kernel in question
        ({"heads": HeadConfig(32, 16, 128)}, HeadConfig(24, 8, 128), "conservative"),
        ({"heads": HeadConfig(32, 16, 64)}, HeadConfig(24, 8, 128), "conservative"),
    ],
)
def test_heads_unlike_take_the_times_of_another_gpu(elsewhere, heads, source, folders):
    """Those of heads that are like them, with the bandwidth of this GPU."""
    put_in_shipped(folders, "here.json", key=OTHER_HEADS)
    there = calibration(key=replace(OTHER_HEADS, gpu="NVIDIA H200", **elsewhere))
    there = replace(
        there,
        bandwidth=4.0e6,
        rates=there.rates | {"item": 9.5},
        stock=there.stock | {"launch": 3.5},
    )
    save(there, folders.shipped / "there.json")
    farther = replace(there, key=replace(there.key, heads=HeadConfig(8, 1, 80)))
    save(replace(farther, stock=there.stock | {"launch": 1.5}), folders.shipped / "farther.json")
    found = find(replace(OTHER_HEADS, heads=heads), NUM_SMS, VERSIONS, folders)
    got = found.calibration
    ratio = OTHER_HEADS.heads.head_dim / heads.head_dim
    assert got.rates == of_wider_blocks(calibration().rates, ratio), "fitted on this GPU"
    if source is None:
        assert (got.source, "here.json" in found.message) == ("conservative", True)
        assert (got.bandwidth, got.stock) == (calibration().bandwidth, calibration().stock)
    else:
        bandwidth = pytest.approx(4.0e6 * usual_bandwidth(H100) / usual_bandwidth(H200))
        assert (got.source, got.bandwidth, got.stock) == (source, bandwidth, there.stock)
        assert f"{source}: there.json" in found.message and "on NVIDIA H200" in found.message


@pytest.mark.parametrize(
    ("gpu", "heads", "source", "name"),
    [
        (H100, (8, 1, 128), "judged", "H100-80GB-HBM3_32-8-128"),
        (H100, (12, 4, 128), "conservative", "H100-80GB-HBM3_16-8-128"),
        (H100, (32, 16, 128), "judged", "H100-80GB-HBM3_16-8-128"),
        (H100, (20, 20, 128), "judged", "H100-80GB-HBM3_32-32-128"),
        (H100, (24, 6, 64), "judged", "H100-80GB-HBM3_32-8-64"),
        (H100, (64, 8, 64), "shipped", "H100-80GB-HBM3_32-8-64"),
        (H100, (8, 1, 256), "shipped", "H100-80GB-HBM3_16-2-256"),
        (H100, (8, 1, 128, "float8_e4m3fn"), "shipped", "H100-80GB-HBM3_32-8-128_float8_e4m3fn"),
        (H100, (16, 8, 128, "float8_e4m3fn"), "shipped", "H100-80GB-HBM3_32-8-128_float8_e4m3fn"),
        (H200, (8, 1, 128, "float8_e4m3fn"), "shipped", "H200_32-8-128_float8_e4m3fn"),
        (H200, (16, 8, 256, "float8_e4m3fn"), "shipped", "H200_16-8-256_float8_e4m3fn"),
        (H200, (8, 1, 256, "float8_e4m3fn"), "shipped", "H200_16-2-256_float8_e4m3fn"),
        (H100, (32, 16, 128, "bfloat16", "fa3"), "shipped", "32-8-128_bfloat16_page1_fa3"),
        (H100, (32, 32, 128, "float8_e4m3fn", "fa3"), "scaled", "32-8-128_bfloat16_page1_fa3"),
        (H100, (64, 8, 64, "bfloat16", "fa3"), "shipped", "64-8-64_bfloat16_page1_fa3"),
        (H100, (32, 8, 96, "bfloat16", "fa3"), "conservative", "32-8-128_bfloat16_page1_fa3"),
        (H200, (32, 16, 128, "bfloat16", "fa3"), "shipped", "H200_32-8-128_bfloat16_page1_fa3"),
        (H200, (64, 8, 64, "bfloat16", "fa3"), "shipped", "H200_64-8-64_bfloat16_page1_fa3"),
        (H200, (8, 1, 128), "judged", "H200_32-8-128"),
        (H200, (24, 6, 64), "shipped", "H200_32-8-64"),
        (H200, (16, 8, 128), "scaled", "H100-80GB-HBM3_16-8-128"),
        (H200, (8, 1, 256), "shipped", "H200_16-2-256"),
        (H200, (16, 8, 256), "shipped", "H200_16-8-256"),
        (H200, (12, 4, 128), "conservative", "H100-80GB-HBM3_16-8-128"),
        (H200, (32, 32, 64), "conservative", "H100-80GB-HBM3_32-32-128"),
        ("NVIDIA GH200 480GB", (32, 8, 128), "conservative", "nothing is measured"),
    ],
)
def test_what_the_shipped_files_serve(gpu, heads, source, name):
    (*sizes, dtype, fallback) = (*heads, *("bfloat16", "flashinfer")[len(heads) - 3 :])
    key = CalibrationKey(gpu, "hopper", HeadConfig(*sizes), dtype, 1, fallback=fallback)
    found = find(key, 132, VERSIONS, SHIPPED)
    assert found.calibration.source == source and source in GAINS
    assert f"{source}: " in found.message and name in found.message
    if source == "judged":
        other = find(replace(key, dtype="float16"), 132, VERSIONS, SHIPPED).calibration
        assert other.source == "scaled", "nothing in float16 was judged"


@pytest.mark.parametrize(
    ("gpu", "num_sms", "source"),
    [
        (H100, 132, "scaled"),
        (H200, 132, "conservative"),
        ("NVIDIA A100-SXM4-80GB", 108, "conservative"),
        ("NVIDIA L40S", 142, "conservative"),
    ],
)
@pytest.mark.parametrize("head_dim", [128, 256])
def test_portable_kernels_take_an_h100_s_rates_with_the_gpu_s_own_bandwidth(
    gpu, num_sms, source, head_dim
):
    key = CalibrationKey(gpu, "portable", HeadConfig(32, 8, head_dim), "bfloat16", 1)
    got = find(key, num_sms, VERSIONS, SHIPPED).calibration
    hopper = find(replace(key, family="hopper"), num_sms, VERSIONS, SHIPPED).calibration
    assert got.source == source
    assert (got.stock, got.bandwidth) == (hopper.stock, hopper.bandwidth), "whatever runs beside it"
    assert type(got.kernel_rates) is PortableRates
    ratio = 1.0 if gpu == H100 else got.bandwidth / usual_bandwidth(H100)
    assert got.rates == vars(PortableRates()) | {"hbm": pytest.approx(3.446e6 * ratio)}
    assert got.kernel_rates.narrow_rows == 16


@pytest.mark.parametrize("family", ["hopper", "portable"])
@pytest.mark.parametrize(
    ("gpu", "num_sms", "source"), [(H100, 132, "scaled"), ("NVIDIA L40S", 142, "conservative")]
)
def test_kv_of_a_byte_an_element_comes_out_of_memory_twice_as_fast(gpu, num_sms, source, family):
    """Where none was measured."""
    key = CalibrationKey(gpu, family, HeadConfig(16, 2, 256), "bfloat16", 1)
    of_two = find(key, num_sms, VERSIONS, SHIPPED).calibration
    narrow = replace(key, dtype="float8_e4m3fn")
    of_one = find(narrow, num_sms, VERSIONS, SHIPPED).calibration
    assert of_one.source == source and of_one.key == narrow
    memory = {name: pytest.approx(2 * of_two.rates[name]) for name in ("hbm", "l2")}
    assert of_one.rates == of_two.rates | memory
    if gpu == H100:  # of heads of 256 there is an H200's file
        fitted = find(replace(narrow, gpu=H200), 132, VERSIONS, SHIPPED).calibration
        ratio = usual_bandwidth(H100) / usual_bandwidth(H200)
        assert of_one.stock == fitted.stock
        assert of_one.bandwidth == pytest.approx(fitted.bandwidth * ratio)
    else:
        assert of_one.stock == stock_time.stock_start(key.heads, kv_bytes=1), "it converts its KV"
        assert of_one.kv_costs.token == pytest.approx(of_two.kv_costs.token / 2)


def test_rates_over_e4m3_hold_on_their_gpu_whatever_runs_beside():
    key = CalibrationKey(H100, "hopper", HeadConfig(32, 8, 128), "float8_e4m3fn", 1)
    own = find(key, 132, VERSIONS, SHIPPED).calibration.rates
    assert find(replace(key, fallback="fa3"), 132, VERSIONS, SHIPPED).calibration.rates == own
    usual = replace(key, dtype="bfloat16")
    for gpu, sms in (("NVIDIA H20", 78), ("NVIDIA H100 PCIe", 114)):
        there, of_two = (
            find(replace(one, gpu=gpu), sms, VERSIONS, SHIPPED).calibration.rates
            for one in (key, usual)
        )
        assert there["hbm"] == pytest.approx(2 * of_two["hbm"]) and there["item"] == of_two["item"]


@pytest.mark.parametrize("heads", [(16, 1, 576, 512), (8, 1, 576, 512), (32, 1, 576, 512)])
def test_latent_kv_has_files_of_its_own(heads):
    key = CalibrationKey(H100, "hopper", HeadConfig(*heads), "bfloat16", 1, fallback="fa3")
    found = find(key, 132, VERSIONS, SHIPPED)
    assert found.calibration.source == "shipped" and "16-1-576-512" in found.message
    assert type(found.calibration.kernel_rates) is LatentRates
    assert found.calibration.kernel_rates == LatentRates()
    on_h200 = find(replace(key, gpu=H200), 132, VERSIONS, SHIPPED)
    assert on_h200.calibration.source == "shipped" and "H200_16-1-576-512" in on_h200.message
    assert type(on_h200.calibration.kernel_rates) is LatentRates
    elsewhere = find(replace(key, gpu="NVIDIA H20"), 78, VERSIONS, SHIPPED).calibration
    assert elsewhere.source == "conservative"
    assert elsewhere.stock == found.calibration.stock


def test_of_equal_rates_those_beside_the_same_fallback_are_taken():
    """The file of exactly these heads and this fallback is used whole."""
    key = CalibrationKey(H200, "hopper", HeadConfig(32, 8, 128), "bfloat16", 1)
    for fallback, name in ((FLASHINFER, ""), ("fa3", "_fa3")):
        own = load(store.SHIPPED / f"NVIDIA-H200_32-8-128_bfloat16_page1{name}.json")
        found = find(replace(key, fallback=fallback), 132, VERSIONS, SHIPPED)
        assert found.calibration.rates == own.rates


# Microseconds of batches 3, 8, 14 and 19 of draw(9, 20, 450000), before files held rates of ours.
STOCK_US = {
    "NVIDIA-H100-80GB-HBM3_16-2-256": [
        146.520863328215, 66.66840498418222, 44.02652435046033, 20.66372309816711],
    "NVIDIA-H100-80GB-HBM3_16-8-128": [
        261.80084701682375, 125.73482302306296, 71.44984197891063, 23.492582061342922],
    "NVIDIA-H100-80GB-HBM3_16-8-256": [
        506.24927457072755, 239.3550170947516, 132.3326714535167, 38.44555100006198],
    "NVIDIA-H100-80GB-HBM3_32-32-128": [
        1067.0935735303108, 285.6979520900782, 247.4956579488972, 59.503882682807756],
    "NVIDIA-H100-80GB-HBM3_32-8-128": [
        285.78524692558403, 101.31172081078839, 71.22400985480473, 35.86403443364081],
    "NVIDIA-H100-80GB-HBM3_32-8-64": [
        161.70636793208863, 73.22333512439897, 43.78857465651847, 27.006377382745196],
    "NVIDIA-H200_32-8-128": [
        202.0830108117742, 95.23411645786773, 54.44460800224185, 34.711382302222496],
}  # fmt: skip


@pytest.mark.parametrize("name", STOCK_US)
def test_predictions_of_stock_times_stay_to_the_last_digit(name):
    predictor = Predictor(load(store.SHIPPED / f"{name}_bfloat16_page1.json"))
    batches = draw(9, 20, 450_000)
    got = [
        predictor.stock(batches[i].paths.seq_lens, batches[i].unique_tokens) for i in (3, 8, 14, 19)
    ]
    assert got == pytest.approx(STOCK_US[name], rel=1e-14)


def test_then_conservative_with_the_coefficients_of_an_h100(folders):
    key = replace(KEY, gpu="NVIDIA H200")
    put_in_shipped(folders, "a.json")
    found = find(key, 99, VERSIONS, folders)
    got, given = found.calibration, calibration()
    assert (got.key, got.source, got.num_sms) == (key, "conservative", 99)
    assert got.bandwidth == usual_bandwidth(H200)
    assert got.stock == given.stock and got.origin is None
    hbm = pytest.approx(given.rates["hbm"] * usual_bandwidth(H200) / usual_bandwidth(H100))
    assert got.rates == given.rates | {"hbm": hbm}
    assert "nothing is measured on NVIDIA H200" in found.message
    assert "sgl-prefix-attn calibrate" in found.message


def test_conservative_without_any_file(tmp_path):
    """Neither folder exists."""
    key = replace(KEY, gpu="NVIDIA B300")
    got = find(key, 148, VERSIONS, Folders(tmp_path / "a", tmp_path / "b")).calibration
    assert (got.source, got.bandwidth, got.stock) == ("conservative", 1.0e6, stock_start())
    assert list(got.rates) == list(vars(KernelRates()))
    assert decode(encode(got)) == got


def test_a_refused_cache_file_is_named_and_the_search_goes_on(folders):
    put_in_shipped(folders, "a.json")
    (folders.shipped / "b.json").write_text("{")
    path = folders.cache / file_name(KEY)
    path.write_text("{}")
    found = find(KEY, NUM_SMS, VERSIONS, folders)
    assert found.calibration.source == "shipped"
    assert f"refused {path}: format None" in found.message and found.warning
    assert f"refused {folders.shipped / 'b.json'}: Input data was truncated" in found.message
    assert "\n" not in found.message


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"key": OTHER_HEADS}, "num_qo_heads=32"),
        ({"key": replace(KEY, gpu="NVIDIA H100-80GB HBM3")}, "gpu='NVIDIA H100-80GB HBM3'"),
        ({"key": replace(KEY, kernels=2)}, "it is for revision 2 of the kernels, these are 1"),
        ({"num_sms": 114}, "114 multiprocessors, this GPU has 132"),
        ({"samples": 0, "errors": {}}, "nothing was measured for it"),
    ],
)
def test_a_cache_file_that_does_not_hold_is_named_with_what_to_do(options, reason, folders):
    save(replace(calibration(), **options), folders.cache / file_name(KEY))
    found = find(KEY, NUM_SMS, VERSIONS, folders)
    assert found.calibration.source == "conservative" and found.warning
    assert f"refused {folders.cache / file_name(KEY)}: " in found.message
    assert reason in found.message and "sgl-prefix-attn calibrate --model" in found.message


@pytest.mark.parametrize(
    "options",
    [{"num_sms": 114}, {"key": replace(KEY, kernels=2)}, {"key": replace(KEY, gpu="NVIDIA H100")}],
    ids=["multiprocessors", "kernels", "a name alike"],
)
def test_shipped_files_of_another_gpu_or_kernels_are_not_used(options, folders):
    put_in_shipped(folders, "a.json", **options)
    assert find(KEY, NUM_SMS, VERSIONS, folders).calibration.source == "conservative"


@pytest.mark.parametrize("path", sorted(store.SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_a_shipped_file_is_the_fit_of_its_samples_in_the_repository(path):
    """By what the fit takes over, and what a fit predicts today: a change of the formula or of the
    work that it sees needs a new one."""
    found = load(path)
    gpu = next(name for name in ("h100", "h200") if name.upper() in found.key.gpu)
    name = f"{gpu}_{found.key.heads.shape.removesuffix('-128')}"
    name += f"_{found.key.dtype}" * (found.key.dtype != "bfloat16")
    name += f"_{found.key.fallback}" * (found.key.fallback != FLASHINFER)
    given = procedure.read_measured(RESULTS / f"calibration_{name}.samples.jsonl")
    every = list(range(len(given.batches)))
    task, began = given.header.task, given.header.date
    assert found.origin == Origin(task.seed, task.count, task.pool_tokens, began)
    plain = replace(found.key, gpu="", heads=KEY.heads) == replace(KEY, gpu="")
    # no batches were held out for the others
    judged = plain and (found.key.heads.head_dim, gpu) in (
        (64, "h100"),
        (128, "h100"),
        (128, "h200"),
    )
    assert found.source == ("judged" if judged else "measured")
    assert (found.key, found.num_sms, found.versions) == (task.key, task.num_sms, task.versions)
    assert (found.bandwidth, found.samples) == (given.header.bandwidth, len(given.batches))
    again = procedure.fit_stock(given, every)

    def predicted(coefficients) -> list[float]:
        costs = found.kv_costs
        return [stock_physical(coefficients.values(), work, costs) for work in given.works]

    assert predicted(found.stock) == pytest.approx(predicted(again), rel=1e-4)
    # without cuts, or where rates are those of the family, they are of another fit
    of_family = vars(rates_of(found.key.family, found.key.heads)())
    if any(map(len, given.cut_us)) and found.rates != of_family:
        rates = procedure.fit_rates(given, procedure.planner_of(given.header), every)
        assert found.rates == pytest.approx(vars(rates), rel=1e-4)
