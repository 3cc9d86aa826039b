"""The demo: end to end as `make demo` runs it, and how it fails."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from eval.demo import __main__ as demo
from eval.demo.report import Run, differences
from eval.demo.server import Server, ServerError, parse_metrics
from eval.demo.workload import Output
from eval.tiny_model import write_tiny_llama

ROOT = Path(__file__).resolve().parents[2]
STEPS, KV = "sglang:prefix_attn_steps_total", "sglang:prefix_attn_kv_tokens_total"
OUTPUTS = [Output("agent 1: search 1", (5, 6, 7)), Output("agent 1: answer", (8, 9))]
COUNTERS = {
    (STEPS, (("reason", "default"), ("variant", "prefix"))): 3.0,
    (STEPS, (("reason", "one request"), ("variant", "stock"))): 1.0,
    (KV, (("kind", "read"),)): 100.0,
    (KV, (("kind", "query_centric"),)): 400.0,
    (KV, (("kind", "unique"),)): 90.0,
}


@pytest.mark.engine
def test_make_demo_end_to_end(tmp_path):
    output = tmp_path / "demo.json"
    command = [sys.executable, "-m", "eval.demo", "--output", str(output)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    summary = json.loads(output.read_text())
    assert summary["outputs_equal"] is True
    assert summary["requests"] == 28
    assert summary["output_tokens"] == 24 * 24 + 4 * 32
    assert summary["prefix_steps"] > 0
    by_reason = summary["steps_by_reason"]
    assert sum(by_reason.get("stock", {}).values()) == summary["stock_steps"]
    assert 0 < summary["kv_tokens_unique"] <= summary["kv_tokens_read"]
    assert summary["kv_tokens_read"] <= summary["kv_tokens_query_centric"] / 2
    assert summary["sglang_version"] == "0.5.17"
    assert summary["device"]


@pytest.mark.engine
def test_a_server_that_cannot_start_says_why(tmp_path):
    model = write_tiny_llama(tmp_path / "model")
    server = Server(model, "no_such_backend", gpu=False, workdir=tmp_path)
    with pytest.raises(ServerError, match="ended with status") as caught, server:
        pass
    assert "invalid choice: 'no_such_backend'" in caught.value.log_tail


@pytest.fixture
def run_demo(monkeypatch, tmp_path):
    """main() over canned runs: (exit status, demo.json)."""

    def run(outputs, backend="prefix"):
        canned = {"prefix": Run("prefix", outputs, COUNTERS, 1.0)}
        stock = Run("stock", OUTPUTS, {}, 1.0)
        monkeypatch.setattr(demo, "write_tiny_llama", lambda path, **_: path)
        monkeypatch.setattr(demo, "serve_workload", lambda name, *_: canned.get(name, stock))
        status = demo.main(["--output", str(tmp_path / "demo.json")])
        return status, json.loads((tmp_path / "demo.json").read_text())

    return run


def test_equal_outputs_succeed_and_the_counters_are_summed(run_demo):
    status, summary = run_demo(OUTPUTS)
    assert status == 0 and summary["outputs_equal"] is True
    assert (summary["requests"], summary["output_tokens"]) == (2, 5)
    assert (summary["prefix_steps"], summary["stock_steps"]) == (3, 1)
    assert (summary["kv_tokens_read"], summary["kv_tokens_query_centric"]) == (100, 400)
    assert summary["steps_by_reason"] == {"prefix": {"default": 3}, "stock": {"one request": 1}}


@pytest.mark.parametrize("request_index", [0, 1])
@pytest.mark.parametrize("token", [0, -1])
def test_one_tampered_token_fails_the_demo(run_demo, capsys, request_index, token):
    tampered = list(OUTPUTS)
    ids = list(OUTPUTS[request_index].token_ids)
    ids[token] += 1
    tampered[request_index] = replace(OUTPUTS[request_index], token_ids=tuple(ids))
    status, summary = run_demo(tampered)
    assert status == 1 and summary["outputs_equal"] is False
    assert f"first {OUTPUTS[request_index].name}" in capsys.readouterr().out


def test_a_missing_or_short_output_is_a_difference(run_demo):
    assert run_demo(OUTPUTS[:1])[0] == 1
    assert run_demo([replace(OUTPUTS[0], token_ids=(5, 6)), OUTPUTS[1]])[0] == 1


def test_differences_name_request_and_token():
    ours = Run("prefix", [replace(OUTPUTS[0], token_ids=(5, 1, 7)), OUTPUTS[1]], {}, 0.0)
    assert differences(ours, Run("stock", OUTPUTS, {}, 0.0)) == ["agent 1: search 1: token 1 of 3"]


def test_metrics_are_parsed():
    text = '# HELP a b\na_total{x="1",b="c d"} 3.0\nplain 2\n'
    assert parse_metrics(text) == {("a_total", (("b", "c d"), ("x", "1"))): 3.0, ("plain", ()): 2.0}
