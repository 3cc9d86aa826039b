"""A server starts with rank 0's calibration on every rank, and says once what it is."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch.distributed
import torch.multiprocessing

from sgl_prefix_attn.calibrate.writing import save
from sgl_prefix_attn.engine import build, sglang_config
from sgl_prefix_attn.plan import CostModel
from sgl_prefix_attn.plan.costs import GPU_RATES
from sgl_prefix_attn.predict import startup, store
from sgl_prefix_attn.predict.predictor import Predictor
from sgl_prefix_attn.records import HeadConfig
from sgl_prefix_attn.settings import Settings
from tests.support.calibrations import HEADS, KEY, NUM_SMS, calibration
from tests.support.parallel import model_runner, ranks


def put_in_cache(home, rates: str):
    given = replace(calibration(versions=store.versions()), rates=GPU_RATES[rates])
    folder = store.cache_folder({"XDG_CACHE_HOME": str(home)})
    save(given, folder / store.file_name(KEY))
    return given


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
        patch.setattr(build, "gpu_key", lambda *args: KEY)
        tiles = SimpleNamespace(num_sms=NUM_SMS)
        patch.setattr(build, "default_tile_set", lambda device, heads: tiles)
        results[index] = build._calibration(model_runner("cuda"), HEADS)
        torch.distributed.destroy_process_group()


@pytest.mark.timeout(120)
def test_every_rank_gets_the_first_ones(tmp_path):
    homes = [tmp_path / "0", tmp_path / "1"]
    wanted = put_in_cache(homes[0], "A100")
    put_in_cache(homes[1], "H200")
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
    wanted = put_in_cache(home, "A100") if measured else None
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
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: gpu)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    heads = HeadConfig(32, 8, 128)
    [shipped] = [
        found
        for found in map(store.load, store.SHIPPED.glob("*.json"))
        if (found.key.gpu, found.key.heads, found.key.page_size) == (gpu, heads, 1)
    ]
    assert startup.default_costs("cuda", heads) == shipped.costs


def test_a_cpu_server_has_no_calibration(home, caplog):
    with caplog.at_level(logging.INFO):
        built = build.build(model_runner(), HEADS, Settings())
    assert built.predictor is None
    assert not [r for r in caplog.records if "calibration" in r.getMessage()]
    assert built.planner.costs == CostModel.for_gpu("cpu", HEADS, 4)
    costs = startup.default_costs("cpu", HEADS, torch.float32)
    assert costs == CostModel.for_gpu("cpu", HEADS, 4)


def test_a_gpu_server_plans_with_the_calibration_of_its_first_rank(monkeypatch):
    """Without a GPU: what is asked of the device is answered here."""
    asked = []
    tiles = build.default_tile_set("cpu", HEADS)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 2**30))
    monkeypatch.setattr(build, "default_tile_set", lambda device, heads: tiles)
    monkeypatch.setattr(build, "new_backend", lambda *args: "backend")
    monkeypatch.setattr(build, "PlanExecutor", lambda *args: "executor")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: KEY.gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(build, "find_calibration", lambda *args: asked.append(args))
    monkeypatch.setattr(build, "of_first_rank", lambda find: find() or calibration())
    monkeypatch.setattr(sglang_config, "parallel", ranks)
    built = build.build(model_runner("cuda", torch.bfloat16), HEADS, Settings())
    assert asked == [(KEY, tiles.num_sms)]
    assert built.planner.costs == calibration().costs
    assert isinstance(built.predictor, Predictor)
