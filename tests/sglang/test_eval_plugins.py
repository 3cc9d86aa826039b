"""What SGLang itself loads in the environment of an evaluation's engine, and a replay on one."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from eval.bench_engine import host_times
from eval.engine_process import environment, make_site, plugin_names
from sgl_prefix_attn.engine.backend import PrefixAttnBackend
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.step.preparer import StepPreparer
from tests.sglang.fake_graph_runner import GraphRunner, assert_prefix
from tests.sglang.fake_server import Server

_LOAD = """
import json, sys
from sglang.srt.platforms import current_platform
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from eval.engine_worker import loaded_plugins
print(json.dumps({
    "plugins": loaded_plugins(),
    "backend": "prefix" in ATTENTION_BACKENDS,
    "platform": type(current_platform).__name__ == "TorchCpuPlatform",
    "product": "sgl_prefix_attn" in sys.modules,
}))
import sgl_prefix_attn
print(sgl_prefix_attn.__file__)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("on_cpu", "product", "evaluation", "plugins"),
    [
        (False, False, False, []),
        (False, True, True, ["eval_plugin", "prefix_attn"]),
        (True, True, False, ["prefix_attn"]),
    ],
)
def test_sglang_loads_what_is_named_and_nothing_else(
    tmp_path, on_cpu, product, evaluation, plugins
):
    names = plugin_names(product=product, evaluation=evaluation)
    site = make_site(tmp_path / "site", host_times.__name__ if evaluation else None)
    ran = subprocess.run(
        [sys.executable, "-c", _LOAD],
        cwd=tmp_path,
        env=environment(os.environ, site, names, on_cpu=on_cpu),
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    *_, found, code = ran.stdout.splitlines()
    assert code.startswith(str(site)), "the code that the result is labelled with"
    found = json.loads(found)
    assert found == {"plugins": plugins, "backend": product, "product": product, "platform": on_cpu}


def test_host_times_of_a_backend(tmp_path, monkeypatch):
    target = tmp_path / "host.json"
    monkeypatch.setenv(host_times.ENV, str(target))
    for owner, name in (
        (StepPreparer, "__init__"), (StepPreparer, "prepare"), (PrefixAttnBackend, "observe"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, getattr(owner, name))  # undone at the end
    writer = ThreadPoolExecutor(1)
    monkeypatch.setattr(host_times, "ThreadPoolExecutor", lambda threads: writer)
    host_times.register()
    server = Server(monkeypatch, Settings(headroom=40))
    Server(monkeypatch)  # a second backend of the process is not counted twice
    runner = GraphRunner(server)
    runner.capture()
    for grown in range(1, 49):
        assert_prefix(runner, grown)
    writer.shutdown()
    found = host_times.read(target)
    assert found["steps"] == {"prefix:default": 48}
    assert found["steady_steps"] == 48 - sum(found["plans"].values()) and found["steady_us"] > 0
    later = host_times.read(target, found)
    assert (later["steps"], later["steady_us"]) == ({}, None)
