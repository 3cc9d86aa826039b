"""Stand-ins for `python -m sglang.launch_server`, `sglang.bench_serving` and
`sglang_router.launch_router` on a search path."""

from __future__ import annotations

import time
from pathlib import Path

_SERVER = """
import http.server, os, pathlib, subprocess, sys
here = pathlib.Path(__file__).parent
port = int(sys.argv[sys.argv.index("--port") + 1])
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
(here / "child").write_text(str(child.pid))
print("says hello")
if "--dies" in sys.argv:
    print("the reason why", file=sys.stderr)
    sys.exit(7)

class Handler(http.server.BaseHTTPRequestHandler):
    answered = 0

    def do_GET(self):
        path = self.path.partition("?")[0]
        waits = path != "/flush_cache" or self.path != path
        fine = "--never-healthy" not in sys.argv and waits
        Handler.answered += path == "/generate"
        with (here / "asked").open("a") as asked:
            asked.write(path + "\\n")
        steps = 'sglang:prefix_attn_steps_total{variant="prefix",reason="r"}'
        body = f"{steps} {Handler.answered}\\nsglang:num_requests_total {Handler.answered}\\n"
        print(f"Decode batch, #running-req: {Handler.answered}", flush=True)
        self.send_response(200 if fine else 503)
        self.end_headers()
        self.wfile.write(body.encode())

    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/die":
            os._exit(9)
        self.do_GET()

http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""

_CLIENT = """
import json, os, pathlib, sys, urllib.request
arguments = dict(zip(sys.argv[1:], sys.argv[2:]))
here = pathlib.Path(__file__).parent
behaviour = (here / "behaviour").read_text()
(here / "client").write_text(str(os.getpid()))
with (here / "calls").open("a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
if behaviour == "fails":
    sys.exit("no such dataset")
if behaviour == "hangs":
    import time; time.sleep(600)
url = arguments["--base-url"]
if behaviour == "kills the server":
    try:
        urllib.request.urlopen(urllib.request.Request(url + "/die", method="POST"))
    except OSError:
        import time; time.sleep(600)
urllib.request.urlopen(urllib.request.Request(url + "/generate", method="POST"))
n = int(arguments["--gsp-num-groups"]) * int(arguments["--gsp-prompts-per-group"])
tokens = int(arguments["--gsp-output-len"])
times = {f"{f}_{m}_ms": 10.0 for f in ("mean", "median", "p99")
         for m in ("ttft", "tpot", "itl", "e2e_latency")}
report = {
    "request_rate": float(arguments["--request-rate"]), "duration": 2.0,
    "total_input_tokens": 100 * n, "total_output_tokens": tokens * n,
    "request_throughput": n / 2.0, "output_throughput": tokens * n / 2.0,
    "cache_report": {"total_cached_tokens": 25 * n, "total_prompt_tokens": 100 * n},
    "output_lens": [tokens] * n, "errors": ["refused" * (behaviour == "refused")] * n, **times,
    "server_info": {"attention_backend": "fa3"},
}
pathlib.Path(arguments["--output-file"]).write_text(json.dumps(report) + "\\n")
"""

_ROUTER = """
import http.server, itertools, pathlib, sys, time, urllib.request
arguments = sys.argv[1:]
value = lambda flag: arguments[arguments.index(flag) + 1]
first = arguments.index("--worker-urls") + 1
urls = list(itertools.takewhile(lambda word: not word.startswith("--"), arguments[first:]))
turns = itertools.cycle(urls if value("--policy") == "round_robin" else urls[:1])
with (pathlib.Path(__file__).parent / "policies").open("a") as policies:
    policies.write(value("--policy") + "\\n")
start = time.monotonic()

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        found = len(urls) if time.monotonic() - start > 0.3 else 0
        self.answer(f'{{"healthy_workers": {found}}}'.encode())

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.answer(urllib.request.urlopen(next(turns) + self.path, data=body).read())

    def answer(self, body):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

http.server.ThreadingHTTPServer(("127.0.0.1", int(value("--port"))), Handler).serve_forever()
"""


def write_router(site: Path) -> Path:
    """Write a package `sglang_router` into a new folder for the search path, and return it.

    Its router finds its servers after a while, sends requests to all in turn if it is told
    round_robin, else to the first, and writes its policy into `policies`.
    """
    package = site / "sglang_router"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "launch_router.py").write_text(_ROUTER)
    return package


def write_stand_in(site: Path) -> Path:
    """Write a package `sglang` into a new folder for the search path, and return the package.

    The server takes --dies and --never-healthy; it writes `child`, the id of a process of its
    group, and the paths it was asked for into `asked`. The client does what the file `behaviour`
    says and writes its arguments into `calls`, its id into `client`.
    """
    package = site / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "launch_server.py").write_text(_SERVER)
    (package / "bench_serving.py").write_text(_CLIENT)
    (package / "behaviour").write_text("fine")
    return package


def assert_ended(package: Path, name: str = "child") -> None:
    """Wait for the process of an id to end: a signal reaches a group's processes a little later."""
    pid = int((package / name).read_text())
    for _ in range(500):
        if not _runs(pid):
            return
        time.sleep(0.01)
    raise AssertionError(f"process {pid} is still there")


def _runs(pid: int) -> bool:
    """Tell whether the process is there and no zombie that somebody else has to collect."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
