"""Attention outputs of three layers of real CPU engines, judged; and judged wrong under faults."""

import json

import pytest

from tests.support.evaluation_process import run_evaluation

pytestmark = [pytest.mark.engine, pytest.mark.long]

SMALL = ("--device", "cpu", "--model-shape", "tiny", "--layers", "3", "--page-size", "1")
# So many tokens that the first request still runs when a busy machine takes in the last one.
REQUESTS = ("--scenarios", "padding", "--scale", "8", "--new-tokens", "256")


def layers(*args):
    """(exit status, what it printed)"""
    ran = run_evaluation("compare_outputs", "layers", *SMALL, *REQUESTS, *args)
    return ran.returncode, ran.stdout


def test_outputs_of_both_backends_are_attention(tmp_path):
    out = tmp_path / "layers.json"
    status, printed = layers("--backends", "prefix,torch_native", "--json", str(out))
    assert status == 0, printed
    rows = json.loads(out.read_text())["rows"]
    judged = [(row["backend"], row["layer"]) for row in rows]
    assert judged == [(b, layer) for b in ("prefix", "torch_native") for layer in range(3)]
    for row in rows:
        assert row["problem"] is None and row["requests"] == 13 and not row["cuda_graph"]
        assert row["kv_slots"] < row["kv_tokens"] / 4, "the requests share a prefix"
        assert 0 < row["error"]["norm"] < 1e-5
        assert row["decision"] == (["prefix", "forced"] if row["backend"] == "prefix" else None)


def test_a_planted_fault_is_found():
    """Each changes attention: tests/cpu/test_planted_faults.py. One of them on a whole engine."""
    status, printed = layers("--backends", "prefix", "--fault", "skip_append")
    assert status == 1, printed
    assert "skip_append planted" in printed and "3 of 3 layer outputs are wrong" in printed
