"""eval.server_process: a server that starts, dies or never answers, and what is left of it.

The server is a stand-in for sglang.launch_server on the search path, started like the real one.
"""

import os
import socket

import pytest

from eval import server_process
from eval.counters import growth
from eval.engine_process import log_tail
from eval.server_process import ServerError, ServerProcess, backend_flags, random_server
from tests.support.stand_in_server import assert_ended, write_stand_in

_COUNTERS = {
    ("sglang:prefix_attn_steps_total", (("reason", "r"), ("variant", "prefix"))): 0.0,
    ("sglang:num_requests_total", ()): 0.0,
}


@pytest.fixture
def package(tmp_path):
    return write_stand_in(tmp_path / "site")


@pytest.fixture
def start(package, tmp_path):
    def make(*arguments, **changes):
        env = os.environ | {"PYTHONPATH": str(package.parent)}
        return ServerProcess(arguments, log=tmp_path / "logs" / "log", env=env, **changes)

    return make


def test_a_healthy_server_answers_and_all_its_processes_end(start, package):
    with start() as server:
        assert server.wait_until_healthy() < 100
        assert server.counters() == _COUNTERS
        assert 0 < server.cpu_seconds()["http"] < 100
        server.flush_cache()  # refused by the stand-in unless it is to wait for running requests
        assert log_tail(server.log).startswith("says hello")
    assert_ended(package)


def test_a_server_that_dies_says_why(start, package):
    with start("--dies") as server, pytest.raises(ServerError, match="status 7 before") as caught:
        server.wait_until_healthy()
    assert "the reason why" in str(caught.value)
    assert_ended(package)


def test_a_server_that_dies_later_is_an_error_of_whoever_asks(start):
    with start() as server:
        server.wait_until_healthy()
        server.check_alive()
        server.stop()
        with pytest.raises(ServerError, match="ended with status -9 while it was in use"):
            server.check_alive()
        with pytest.raises(ServerError, match="ended with status -9 before it answered /metrics"):
            server.counters()
        with pytest.raises(ServerError, match="ended with status -9"):
            server.cpu_seconds()


def test_a_server_that_is_never_healthy_is_given_up(start, package, monkeypatch, capsys):
    monkeypatch.setattr(server_process, "_TELL_EVERY_S", 0.0)
    server = start("--never-healthy", start_limit_s=1.0)
    with server, pytest.raises(ServerError, match="was not healthy after 1 s"):
        server.wait_until_healthy()
    assert_ended(package)
    assert "still starting after" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("backend", "flags"),
    [
        ("default", ""),
        ("fa3", "--attention-backend fa3"),
        ("prefix:portable", "--attention-backend prefix"),
        ("fa3/prefix", "--prefill-attention-backend fa3 --decode-attention-backend prefix"),
    ],
)
def test_flags_of_a_backend(backend, flags):
    assert " ".join(backend_flags(backend)) == flags


@pytest.mark.parametrize(
    ("backend", "on_cpu", "plugins", "kernels"),
    [
        ("default", False, "eval_plugin", None),  # a name that nothing has: none is loaded
        ("fa3/prefix:portable", False, "prefix_attn", "portable"),
        ("torch_native", True, "prefix_attn,prefix_attn_cpu", None),
    ],
)
def test_a_backend_s_server_loads_what_it_needs(tmp_path, backend, on_cpu, plugins, kernels):
    server = random_server(backend, tmp_path / "model", tmp_path, 8, "--extra", on_cpu=on_cpu)
    assert server.env["SGLANG_PLUGINS"] == plugins
    assert server.env.get("PREFIX_ATTN_KERNELS") == kernels
    assert ("PREFIX_ATTN_CPU_PLATFORM" in server.env) == on_cpu
    assert server.arguments[-1] == "--extra" and ("--device" in server.arguments) == on_cpu
    assert server.log.parent.parent == tmp_path and server.env["PATH"] == os.environ["PATH"]


def test_growth_of_counters():
    assert growth({"a": 1.0}, {"a": 3.0, "b": 2.0}) == {"a": 2.0, "b": 2.0}


def test_a_port_that_is_taken_is_passed_over(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        ports = iter([taken.getsockname()[1], 0])
        monkeypatch.setattr(server_process.secrets, "randbelow", lambda most: next(ports) - 10_000)
        assert server_process.free_port() == 0


def test_the_end_of_a_log_comes_with_the_first_error(tmp_path):
    """Behind which stacks of threads can be longer."""
    log = tmp_path / "log"
    log.write_text("a warning\ntorch.AcceleratorError: CUDA error: x\n" + "frame\n" * 50 + "end\n")
    told = log_tail(log).splitlines()
    assert told[:2] == ["torch.AcceleratorError: CUDA error: x", "..."]
    assert len(told) == 32 and told[-1] == "end"
    log.write_text("KeyError: 'y'\nend\n")
    assert log_tail(log) == "KeyError: 'y'\nend"
