"""Which family of kernels a server starts with, and what it does where row tiles fail."""

import logging
from types import SimpleNamespace

import pytest
import torch

from sgl_prefix_attn.engine import build, sglang_config
from sgl_prefix_attn.execute import self_test
from sgl_prefix_attn.execute.backends.torch_backend import TorchBackend
from sgl_prefix_attn.execute.backends.torch_row_tiles import TorchRowTiles
from sgl_prefix_attn.execute.self_test import KernelsHang, check_kernels, self_test_paths
from sgl_prefix_attn.plan import Planner
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.row_tile_planner import RowTilePlanner
from sgl_prefix_attn.records import HeadConfig
from sgl_prefix_attn.settings import Settings
from tests.support.parallel import ranks
from tests.support.torch_row_tiles import say_that_row_tiles_run

HEADS = HeadConfig(8, 2, 16)
FORCED = Settings(kernels="row_tiles")


def runner(soft_cap=0.0):
    layers = pytest.importorskip("sglang.srt.layers.radix_attention")
    layer = layers.RadixAttention(8, 16, 0.25, 2, layer_id=0, logit_cap=soft_cap)
    return SimpleNamespace(
        device="cpu",
        dtype=torch.float32,
        kv_cache_dtype=torch.float32,
        model=torch.nn.Sequential(layer),
        req_to_token_pool=SimpleNamespace(size=4),
        max_total_num_tokens=256,
    )


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch):
    say_that_row_tiles_run(monkeypatch.setattr)
    monkeypatch.setattr(sglang_config, "parallel", ranks)


def start(caplog, settings=Settings(), **options):  # noqa: B008
    """The execution, and whether it is row tiles; the log says the same."""
    with caplog.at_level(logging.INFO):
        built = build.build(runner(**options), HEADS, settings)
    row_tiles = isinstance(built.planner, RowTilePlanner)
    assert isinstance(built.executor.backend, TorchRowTiles if row_tiles else TorchBackend)
    assert isinstance(built.planner, RowTilePlanner if row_tiles else Planner)
    text = "steps run row tiles" if row_tiles else "steps run packs"
    assert text in caplog.text
    return built, row_tiles


@pytest.mark.parametrize("settings", [Settings(headroom=7), FORCED])
def test_a_hopper_gpu_starts_with_row_tiles(settings, caplog):
    built, row_tiles = start(caplog, settings)
    assert row_tiles and built.planner.headroom == settings.headroom
    padding = build.padding_plan(built.planner)
    assert padding.batch_size == 0 and built.executor.capacity.covers(padding)


@pytest.mark.parametrize(
    ("settings", "why"),
    [(Settings(kernels="triton"), "kernels:triton"), (Settings("pat"), "strategy:pat")],
)
def test_settings_that_ask_for_packs(settings, why, caplog):
    assert not start(caplog, settings)[1] and f"({why})" in caplog.text


def test_another_gpu_starts_with_packs(monkeypatch, caplog):
    monkeypatch.setattr(build, "why_no_row_tiles", lambda *args: "compute:8.0")
    assert not start(caplog)[1] and "(compute:8.0)" in caplog.text
    with pytest.raises(ValueError, match="compute:8.0"):
        build.build(runner(), HEADS, FORCED)


def fails_to_compile(self, workspace, layer):
    raise RuntimeError("ptxas failed")


def forgets_the_output(self, workspace, layer):
    pass


@pytest.mark.parametrize(
    ("forward", "text"),
    [(fails_to_compile, "ptxas failed"), (forgets_the_output, "self-test is nan off")],
)
def test_row_tiles_that_fail_leave_packs(forward, text, monkeypatch, caplog):
    monkeypatch.setattr(TorchRowTiles, "forward", forward)
    assert not start(caplog)[1]
    assert text in caplog.text and "(failed_at_start)" in caplog.text
    with pytest.raises(RuntimeError, match="SGL_PREFIX_ATTN_KERNELS=row_tiles"):
        build.build(runner(), HEADS, FORCED)


def test_ranks_start_alike(monkeypatch, caplog):
    """Row tiles that failed on another rank run on none."""
    told = []

    def agreement():
        return lambda ok: told.append(ok) or False

    monkeypatch.setattr(build, "agreement", agreement)
    assert not start(caplog)[1] and told == [True]


def test_kernels_that_hang_stop_the_start(monkeypatch):
    """They keep the device: what helps is said, and nothing else is tried on it."""

    def hang(*args):
        raise KernelsHang("no end")

    monkeypatch.setattr(self_test, "wait_for", hang)
    with pytest.raises(KernelsHang, match="no end; set SGL_PREFIX_ATTN_KERNELS=triton"):
        build.build(runner(), HEADS, Settings())


@pytest.mark.parametrize("queries", [1, 3])
def test_waiting_for_a_device_ends(queries, monkeypatch):
    left = [queries]

    def query():
        left[0] -= 1
        return left[0] < 0

    event = SimpleNamespace(record=lambda: None, query=query)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    self_test.wait_for(torch.device("cuda"), 60.0)
    assert left == [-1]
    left[0] = 10**9
    with pytest.raises(KernelsHang, match="within 0 s"):
        self_test.wait_for(torch.device("cuda"), 0.01)


def test_a_lost_context_is_not_survived(monkeypatch):
    def lose(self, workspace, layer):
        raise torch.AcceleratorError("lost")

    monkeypatch.setattr(TorchRowTiles, "forward", lose)
    with pytest.raises(torch.AcceleratorError):
        build.build(runner(), HEADS, Settings())


def test_the_kernel_of_the_models_soft_cap_is_tried(monkeypatch, caplog):
    caps, forward = [], TorchRowTiles.forward

    def noting(self, workspace, layer):
        caps.append(layer.soft_cap)
        forward(self, workspace, layer)

    monkeypatch.setattr(TorchRowTiles, "forward", noting)
    assert start(caplog, soft_cap=30.0)[1] and set(caps) == {30.0}


@pytest.mark.parametrize("fault", ["append", "fill"])
def test_the_self_test_finds_a_step_that_is_skipped(fault, monkeypatch):
    monkeypatch.setattr(TorchRowTiles, fault, lambda *args: None)
    device = torch.device("cpu")
    backend = TorchRowTiles(HEADS, torch.float32, device)
    plan = RowTilePlanner(HEADS, num_sms=16, headroom=2).plan(self_test_paths())
    with pytest.raises((RuntimeError, AssertionError)):
        check_kernels(backend, [plan], HEADS, torch.float32, device, 0.0)


def test_the_self_test_covers_split_tiles_and_whole_ones():
    planner = RowTilePlanner(HeadConfig(32, 8, 128), num_sms=132)
    cuts = planner.cuts(build_forest(self_test_paths()))
    parts = {int(cut.parts.max()) for cut in cuts}
    assert min(parts) == 1 and max(parts) > 1
