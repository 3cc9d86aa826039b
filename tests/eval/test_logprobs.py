"""Log-probabilities of real CPU engines along the same tokens; and judged wrong under a fault."""

import json

import pytest

from eval.compare_outputs.__main__ import main

pytestmark = [pytest.mark.engine, pytest.mark.long]

SMALL = ("--device", "cpu", "--model-shape", "tiny", "--layers", "3", "--page-size", "1")
REQUESTS = ("--scenarios", "padding", "--scale", "8", "--backends", "torch_native,prefix")


def test_prefix_steps_give_stock_log_probabilities_and_a_fault_is_found(tmp_path, capsys):
    out = tmp_path / "logprobs.json"
    argv = ["logprobs", *SMALL, *REQUESTS, "--json", str(out)]
    status = main(argv)
    said = capsys.readouterr()
    assert status == 0, said.out + said.err
    (row,) = json.loads(out.read_text())["rows"]
    assert row["tokens"] == 13 * 63 and row["equal_greedy"] == 1.0
    assert 0 < row["mean"] < 1e-4

    status = main([*argv, "--fault", "skip_append"])
    said = capsys.readouterr()
    assert status == 1, said.out + said.err
    assert "skip_append planted" in said.out and "1 of 1 comparisons are wrong" in said.out
    (row,) = json.loads(out.read_text())["rows"]
    assert row["mean"] > 0.01
