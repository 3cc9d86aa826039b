"""eval.server_process: a server that starts, dies or never answers, and what is left of it.

The server is a stand-in for sglang.launch_server on the search path: started like the real one.
"""

import os
import socket
import time

import pytest

from eval import server_process
from eval.server_process import ServerError, ServerProcess, backend_flags, backend_server, growth

_STAND_IN = """
import http.server, subprocess, sys, pathlib
here = pathlib.Path(__file__).parent
behaviour, *_ = sys.argv[1:]
port = int(sys.argv[sys.argv.index("--port") + 1])
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
(here / "child").write_text(str(child.pid))
print("says hello")
if behaviour == "--dies":
    print("the reason why", file=sys.stderr)
    sys.exit(7)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        path = self.path.partition("?")[0]
        refused = behaviour == "--never-healthy" or (path == "/flush_cache" and self.path == path)
        body = b'steps_total{variant="prefix"} 3.0\\n' if path == "/metrics" else b""
        self.send_response(503 if refused else 200)
        self.end_headers()
        self.wfile.write(body)
    do_POST = do_GET

http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def start(tmp_path):
    """Makes a stand-in server of a behaviour; its child's process id is in `start.child`."""
    package = tmp_path / "site" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "launch_server.py").write_text(_STAND_IN)

    def make(behaviour, **changes):
        env = os.environ | {"PYTHONPATH": str(package.parent)}
        return ServerProcess([behaviour], log=tmp_path / "logs" / "log", env=env, **changes)

    make.child = package / "child"
    return make


def runs(pid: int) -> bool:
    """Whether the process is there and no zombie that somebody else has to collect."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def assert_ended(pid: int) -> None:
    for _ in range(500):  # a signal reaches the group's other processes a little later
        if not runs(pid):
            return
        time.sleep(0.01)
    raise AssertionError(f"process {pid} is still there")


def test_a_healthy_server_answers_and_all_its_processes_end(start):
    with start("--fine") as server:
        server.wait_until_healthy()
        child = int(start.child.read_text())
        assert runs(child)
        assert server.counters() == {("steps_total", (("variant", "prefix"),)): 3.0}
        server.flush_cache()
        assert server.log_tail().startswith("says hello")
    assert_ended(child)


def test_a_server_that_dies_says_why(start):
    with start("--dies") as server, pytest.raises(ServerError, match="status 7 before") as caught:
        server.wait_until_healthy()
    assert "the reason why" in caught.value.log_tail
    assert_ended(int(start.child.read_text()))


def test_a_server_that_dies_later_is_an_error_of_whoever_asks(start):
    with start("--fine") as server:
        server.wait_until_healthy()
        server.check_alive()
        server.stop()
        with pytest.raises(ServerError, match="ended with status -9 while it was in use"):
            server.check_alive()
        with pytest.raises(ServerError, match="ended with status -9 before it answered /metrics"):
            server.counters()


def test_a_server_that_is_never_healthy_is_given_up(start):
    told = []
    server = start("--never-healthy", start_limit_s=1.0, progress=told.append)
    with server, pytest.raises(ServerError, match="was not healthy after 1 s"):
        server.wait_until_healthy()
    assert_ended(int(start.child.read_text()))


def test_waiting_is_told(start, monkeypatch):
    monkeypatch.setattr(server_process, "_TELL_EVERY_S", 0.0)
    told = []
    server = start("--never-healthy", start_limit_s=1.0, progress=told.append)
    with server, pytest.raises(ServerError):
        server.wait_until_healthy()
    assert told and "still starting after" in told[0]


def test_a_taken_port_is_refused_before_anything_starts(start):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ServerError, match=f"port {port} is not free"):
            start("--fine", port=port).__enter__()
    assert not start.child.exists()


@pytest.mark.parametrize(
    ("backend", "flags"),
    [
        ("default", ""),
        ("fa3", "--attention-backend fa3"),
        ("prefix:packs", "--attention-backend prefix"),
        ("fa3/prefix", "--prefill-attention-backend fa3 --decode-attention-backend prefix"),
    ],
)
def test_flags_of_a_backend(backend, flags):
    assert " ".join(backend_flags(backend)) == flags


@pytest.mark.parametrize(
    ("backend", "on_cpu", "plugins", "kernels"),
    [
        ("default", False, "eval_plugin", None),  # a name that nothing has: none is loaded
        ("fa3/prefix:packs", False, "prefix_attn", "packs"),
        ("torch_native", True, "prefix_attn,prefix_attn_cpu", None),
    ],
)
def test_a_backend_s_server_loads_what_it_needs(tmp_path, backend, on_cpu, plugins, kernels):
    server = backend_server(
        backend, tmp_path / "model", tmp_path, arguments=["--extra"], on_cpu=on_cpu
    )
    assert server._env["SGLANG_PLUGINS"] == plugins
    assert server._env.get("SGL_PREFIX_ATTN_KERNELS") == kernels
    assert ("SGL_PREFIX_ATTN_CPU_PLATFORM" in server._env) == on_cpu
    assert server._arguments[-1] == "--extra" and ("--device" in server._arguments) == on_cpu
    assert server.log.parent.parent == tmp_path and server._env["PATH"] == os.environ["PATH"]


def test_growth_of_counters():
    assert growth({"a": 1.0}, {"a": 3.0, "b": 2.0}) == {"a": 2.0, "b": 2.0}
