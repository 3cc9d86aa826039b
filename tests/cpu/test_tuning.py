"""A wrapper and a server with the same layers on the same GPU plan alike."""

from types import SimpleNamespace

import pytest
import torch

from sgl_prefix_attn.plan import CostModel
from sgl_prefix_attn.predict import store
from sgl_prefix_attn.predict.startup import default_costs
from sgl_prefix_attn.records import HeadConfig

HEADS = HeadConfig(32, 8, 128)


@pytest.mark.parametrize("gpu", ["NVIDIA H100 80GB HBM3", "NVIDIA H200"])
def test_on_a_gpu_the_costs_are_those_of_its_calibration(monkeypatch, tmp_path, gpu):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nothing measured on this machine
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: gpu)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    [shipped] = [
        found
        for found in map(store.load, store.SHIPPED.glob("*.json"))
        if (found.key.gpu, found.key.heads, found.key.page_size) == (gpu, HEADS, 1)
    ]
    assert default_costs("cuda", HEADS) == shipped.costs


def test_on_a_cpu_they_are_the_table_s():
    assert default_costs("cpu", HEADS, torch.float32) == CostModel.for_gpu("cpu", HEADS, 4)
