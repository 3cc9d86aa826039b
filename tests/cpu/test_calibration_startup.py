"""A server starts with rank 0's calibration on every rank, and says once what it is."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed
import torch.multiprocessing

from sgl_prefix_attn.engine import build, sglang_config
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.predict import startup, store
from sgl_prefix_attn.predict.predictor import Predictor
from sgl_prefix_attn.predict.record import RATES, CalibrationKey
from sgl_prefix_attn.records import HeadConfig, PathTable
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.tools.calibrate.writing import save
from tests.support.calibrations import HEADS, KEY, NUM_SMS, calibration
from tests.support.parallel import model_runner, ranks

PORTABLE = replace(KEY, family="portable")


def put_in_cache(home, bandwidth: float):
    given = replace(calibration(versions=store.versions()), bandwidth=bandwidth)
    folder = store.cache_folder({"XDG_CACHE_HOME": str(home)})
    save(given, folder / store.file_name(KEY))
    return given


def on_a_gpu(patch, gpu: str, num_sms: int = NUM_SMS, capability=(9, 0)):
    """Without a GPU: what is asked of the device is answered here."""
    properties = SimpleNamespace(multi_processor_count=num_sms)
    patch.setattr(torch.cuda, "get_device_name", lambda device: gpu)
    patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """No cache of this machine, nothing shipped."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(store, "SHIPPED", tmp_path / "none")
    return tmp_path


def rank(index, rendezvous, homes, results):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(homes[index]))
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=index, world_size=2
        )
        patch.setattr(sglang_config, "parallel", lambda: ranks(2, torch.distributed.group.WORLD))
        on_a_gpu(patch, KEY.gpu)
        runner = model_runner("cuda", torch.bfloat16)
        results[index] = build._calibration(runner, HEADS, "hopper", "flashinfer")
        torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_every_rank_gets_the_first_ones(tmp_path):
    homes = [tmp_path / "0", tmp_path / "1"]
    wanted = put_in_cache(homes[0], 1.7e6)
    put_in_cache(homes[1], 4.2e6)
    with torch.multiprocessing.Manager() as manager:
        results = manager.dict()
        torch.multiprocessing.spawn(rank, (tmp_path / "meet", homes, results), nprocs=2)
        assert dict(results) == {0: wanted, 1: wanted}


@pytest.mark.parametrize(
    ("measured", "versions", "source", "level", "says"),
    [
        (True, {}, "measured", "INFO", "measured on this machine"),
        (False, {}, "conservative", "WARNING", "`sgl-prefix-attn calibrate"),
        (True, {"torch": "9.0"}, "measured", "WARNING", "not 9.0; `sgl-prefix-attn calibrate"),
    ],
)
def test_one_rank_says_what_it_found(
    measured, versions, source, level, says, home, caplog, monkeypatch
):
    """With no process group."""
    wanted = put_in_cache(home, 1.7e6) if measured else None
    here = store.versions() | versions
    monkeypatch.setattr(store, "versions", lambda: here)
    with caplog.at_level(logging.INFO):
        found = startup.find_calibration(KEY, NUM_SMS)
    assert found.source == source and wanted in (None, found)
    (record,) = caplog.records
    assert record.levelname == level and says in record.message


@pytest.mark.parametrize("gpu", ["NVIDIA H100 80GB HBM3", "NVIDIA H200"])
def test_a_library_call_on_a_gpu_plans_with_its_calibration_too(monkeypatch, tmp_path, gpu):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nothing measured on this machine
    on_a_gpu(monkeypatch, gpu)
    heads, device = HeadConfig(32, 8, 128), torch.device("cuda")
    [shipped] = [
        found
        for found in map(store.load, store.SHIPPED.glob("*.json"))
        if found.key == CalibrationKey(gpu, "hopper", heads, "bfloat16", 1)
    ]
    rates = startup.default_rates("hopper", device, heads, torch.bfloat16, 1)
    assert vars(rates) == shipped.rates
    portable = startup.default_rates("portable", device, heads, torch.bfloat16, 1)
    assert type(portable) is RATES["portable"]
    assert (portable == RATES["portable"]()) is ("H100" in gpu)


@pytest.mark.parametrize("family", RATES)
def test_on_a_cpu_plans_are_an_h100_s(family):
    rates = startup.default_rates(family, torch.device("cpu"), HEADS, torch.float32, 1)
    assert rates == RATES[family]()


def test_a_cpu_server_has_no_calibration(home, caplog):
    with caplog.at_level(logging.INFO):
        built = build.build(model_runner(), HEADS, Settings(), "torch_native")
    assert built.predictor is None
    assert not [r for r in caplog.records if "calibration" in r.getMessage()]
    assert built.planner.rates == RATES["portable"]()


@pytest.mark.parametrize("fallback", ["flashinfer", "fa3", "triton"])
def test_a_gpu_server_plans_with_the_calibration_of_its_first_rank(fallback, monkeypatch):
    """With that of the kernels that it runs, its own and the fallback's."""
    asked, given = [], calibration(PORTABLE)
    on_a_gpu(monkeypatch, KEY.gpu, capability=(8, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 2**30))
    monkeypatch.setattr(build, "PlanExecutor", lambda *args: "executor")
    monkeypatch.setattr(build, "find_calibration", lambda *args: asked.append(args))
    monkeypatch.setattr(build, "of_first_rank", lambda find: find() or given)
    monkeypatch.setattr(sglang_config, "parallel", ranks)
    built = build.build(model_runner("cuda", torch.bfloat16), HEADS, Settings(), fallback)
    assert asked == [(replace(PORTABLE, fallback=fallback), NUM_SMS)]
    assert built.planner.rates == given.kernel_rates
    assert isinstance(built.predictor, Predictor)


def test_stock_times_are_the_calibration_s_and_prefix_times_the_planner_s():
    given = calibration(source="judged")
    predictor = Predictor(given)
    lens = np.array([700, 800])
    slower = Predictor(replace(given, bandwidth=given.bandwidth / 2))
    assert 0 < predictor.stock(lens, 900) < slower.stock(lens, 900)
    planner = Planner(HEADS, num_sms=NUM_SMS, rates=given.kernel_rates)
    plan = planner.plan(PathTable.of([-1], [16], [0, 0], [17, 18]))
    assert predictor.prefix(plan) == plan.predicted_us > 0
    assert predictor.source == "judged"
