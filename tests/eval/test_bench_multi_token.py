"""eval.bench_multi_token on the CPU: the torch interpreter stands for the kernel."""

from dataclasses import replace

import pytest
import torch

from eval import provenance
from eval.bench_kernel.case import build_case
from eval.bench_kernel.providers.planned import PlannedRunnable, Server
from eval.bench_multi_token import Workload, bench, main
from sgl_prefix_attn.records import HeadConfig

HEADS = HeadConfig(8, 2, 16)
ARGS = ["--device", "cpu", "--heads", "8/2", "--head-dim", "16"]


@pytest.mark.slow
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
    assert all(row["status"].startswith("unavailable: needs an NVIDIA GPU") for row in others)
    assert "us" not in others[0] and "1,5_70,9:4, 8/2 heads" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("spoil", "says"),
    [("not causal", "first run"), ("a row", "off by nan"), ("timed", "timed, layer 0")],
)
def test_wrong_outputs_have_no_time(spoil, says, monkeypatch):
    """Attention that sees later tokens, a row that is not written, an output wrong when timed."""
    workload = Workload.parse("1,5_70,9:4")
    case = build_case(workload.tree, HEADS, 1, torch.float32, torch.device("cpu"), tokens=4)
    case = replace(case, k=case.k[:2], v=case.v[:2])
    right, runs = PlannedRunnable.run, []

    def run(self, layer: int) -> torch.Tensor:
        runs.append(layer)
        out = right(self, layer)
        if spoil == "a row":
            out[7] = float("nan")
        if spoil == "not causal":
            out[2] = out[3]
        if spoil == "timed" and len(runs) > 6:  # those of the two plans and of the capture
            out[-1] *= 1.5
        return out

    monkeypatch.setattr(PlannedRunnable, "run", run)
    (row,) = bench(workload, case, [Server()])
    assert row["status"].startswith("wrong: ") and says in row["status"] and "us" not in row


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
