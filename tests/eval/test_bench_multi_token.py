"""eval.bench_multi_token on the CPU: the torch interpreter stands for the kernel."""

import pytest
import torch

from eval import provenance
from eval.bench_multi_token.__main__ import bench, main
from eval.bench_multi_token.providers import PROVIDERS, Prepared, prefix
from eval.bench_multi_token.workload import Workload
from sgl_prefix_attn.records import HeadConfig

HEADS = HeadConfig(8, 2, 16)
ARGS = ["--device", "cpu", "--heads", "8/2", "--head-dim", "16", "--dtype", "bf16"]


def test_a_run_is_written_with_what_is_missing(tmp_path, capsys):
    out = tmp_path / "out.json"
    workloads = "1,5_70,9:4;3_40:1;2_90:80"
    argv = [*ARGS, "--workloads", workloads, "--providers", "prefix,fa3", "--json", str(out)]
    assert main(argv) == 0
    result = provenance.load(out)
    ours = [row for row in result["rows"] if row["provider"] == "prefix"]
    assert [row["workload"] for row in ours] == workloads.split(";")
    assert all(row["status"] == "ok" and row["us"] > 0 for row in ours)
    assert all(row["tiles"] > 0 and row["predicted_us"] > 0 for row in ours)
    others = [row for row in result["rows"] if row["provider"] == "fa3"]
    assert all(row["status"].startswith("failed: ModuleNotFoundError") for row in others)
    assert "us" not in others[0] and "1,5_70,9:4, 8/2 heads" in capsys.readouterr().out


@pytest.mark.parametrize("spoil", ["not causal", "a row", "timed"])
def test_wrong_outputs_have_no_time(spoil, monkeypatch):
    """Attention that sees later tokens, a row that is not written, an output wrong when timed."""
    workload = Workload.parse("1,5_70,9:4")
    case = workload.case(HEADS, torch.float32, torch.device("cpu"))
    right = prefix(case, workload)
    runs = []

    def run(layer: int) -> torch.Tensor:
        runs.append(layer)
        out = right.run(layer)
        if spoil == "a row":
            out[7] = float("nan")
        if spoil == "not causal":
            out[2] = out[3]
        if spoil == "timed" and len(runs) > 1:
            out[-1] *= 1.5
        return out

    monkeypatch.setitem(PROVIDERS, "prefix", lambda *_: Prepared(run, {}))
    (row,) = bench(workload, case, ["prefix"])
    assert row["status"].startswith("wrong") and "us" not in row


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,5_70,9", "must be TREE:TOKENS"),
        ("1,5_70,9:10", "tokens must be 1 to 9"),
        ("1,5_70,9:0", "tokens must be 1 to 9"),
        ("x:1", "x"),
    ],
)
def test_bad_workloads_are_refused(text, message, capsys):
    with pytest.raises(ValueError, match=message):
        Workload.parse(text)
    with pytest.raises(SystemExit):
        main([*ARGS, "--workloads", text])
    assert message in capsys.readouterr().err
