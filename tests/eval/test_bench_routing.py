"""eval.bench_routing: which server gets what, and what is kept of it. Servers, router and client
are stand-ins."""

import os

import pytest

from eval import bench_routing as bench
from eval import provenance, server_process
from eval.bench_serving import client
from tests.support.stand_in_server import assert_ended, write_router, write_stand_in

LOAD = "2x3:5+2:4"


@pytest.fixture
def packages(tmp_path, monkeypatch):
    package, router = write_stand_in(tmp_path / "site"), write_router(tmp_path / "router")
    folders = (str(package.parent), str(router.parent), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))
    monkeypatch.syspath_prepend(router.parent)
    for module in (server_process, client):
        monkeypatch.setattr(module, "_POLL_S", 0.02)
    return package, router


def run(tmp_path, *extra):
    out = tmp_path / "out.json"
    arguments = ["--device", "cpu", "--model-shape", "tiny", "--json", str(out), "--loads", LOAD]
    status = bench.main([*arguments, *extra])
    return status, provenance.load(out) if out.exists() else None


def test_each_policy_sends_every_load_to_the_same_servers(packages, tmp_path):
    status, result = run(tmp_path, "--backends", "torch_native,prefix")
    assert status == 0 and result["meta"]["settings"]["servers"] == 2
    names = ("backend", "policy", "load", "rate")
    assert [tuple(row[name] for name in names) for row in result["rows"]] == [
        (backend, policy, LOAD, "offline")
        for backend in ("torch_native", "prefix")
        for policy in ("cache_aware", "round_robin")
    ]
    package, router = packages
    assert (router / "policies").read_text().split() == ["cache_aware", "round_robin"] * 2
    # Six requests that warm up were before, and do not count: the one that does is the client's.
    assert [row["requests"] for row in result["rows"]] == [[1, 0]] * 4
    assert all(row["steps"] == {"prefix:r": 1.0} for row in result["rows"])
    # The log of both: the first server has answered all seven of the first policy.
    assert [row["peak_running"] for row in result["rows"]] == [7, 11] * 2
    assert (package / "asked").read_text().count("/flush_cache") == 2 * 4
    assert_ended(package)


def test_a_server_that_dies_is_told(packages, tmp_path, capsys):
    (packages[0] / "behaviour").write_text("kills the server")
    assert run(tmp_path, "--backends", "prefix") == (1, None)
    error = capsys.readouterr().err
    assert "ended with status 9" in error and "2 of 2 runs failed" in error
    assert_ended(packages[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "fair"], "argument --policies: 'fair', known are cache_aware"),
        (["--rates", "inf,inf"], "argument --rates: names one twice"),
        (["--rates", "inf,70%"], "argument --rates: 70% is a share"),
        (["--loads", "gps"], "load 'gps': known are"),
    ],
)
def test_bad_arguments_are_named(packages, capsys, arguments, message):
    with pytest.raises(SystemExit):
        bench.main(["--device", "cpu", *arguments])
    assert message in capsys.readouterr().err


def test_a_router_that_is_missing_is_told_before_servers_start(monkeypatch, capsys):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SystemExit):
        bench.main(["--device", "cpu"])
    assert "pip install sglang-router" in capsys.readouterr().err
