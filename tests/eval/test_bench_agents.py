"""eval.bench_agents without a server: figures, tables, and what ends it with status 1."""

import pytest
import torch

from eval import report
from eval.bench_agents import __main__ as bench_agents
from eval.bench_agents import agent_tables, runs


@pytest.fixture(autouse=True)
def _without_sglang(monkeypatch):
    """The programs import SGLang, and only their sizes are asked for."""
    monkeypatch.setattr(runs, "sizes", lambda program, scale: {})


def counters(**changes):
    known = {
        "sglang:num_requests_total": 4.0,
        "sglang:prompt_tokens_total": 400.0,
        "sglang:cached_tokens_total": 300.0,
        "sglang:generation_tokens_total": 80.0,
        "sglang:inter_token_latency_seconds_sum": 0.6,
        "sglang:inter_token_latency_seconds_count": 60.0,
    }
    steps = {("prefix", "default"): 9.0, ("prefix", "x"): 1.0, ("stock", "y"): 3.0}
    return {(name, ()): value for name, value in (known | changes).items()} | {
        ("sglang:prefix_attn_steps_total", (("reason", reason), ("variant", variant))): value
        for (variant, reason), value in steps.items()
    }


def test_figures_of_a_run():
    row = runs.figures(counters(), 2.0)
    assert (row["requests"], row["prompt_tokens"], row["output_tokens"]) == (4, 400, 80)
    assert (row["tokens_per_s"], row["cached_share"]) == (40.0, 0.75)
    assert row["tpot_ms"] == pytest.approx(10.0)
    assert (row["prefix_steps"], row["stock_steps"]) == (10, 3)
    short = counters(**{"sglang:inter_token_latency_seconds_count": 0.0})
    assert runs.figures(short, 2.0)["tpot_ms"] is None


def row(program, backend, wall_s, **changes):
    figures = runs.figures(counters(), wall_s)
    return {"program": program, "backend": backend, "count": 64, **figures, **changes}


def test_on_a_cpu_what_is_not_said_is_small(monkeypatch):
    args = bench_agents._parse(["--device", "cpu"])
    assert (args.model_shape, args.count, args.scale) == ("tiny", 4, 32)
    assert args.backends == ["torch_native", "prefix"]
    assert bench_agents._parse(["--device", "cpu", "--count", "9"]).count == 9
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    args = bench_agents._parse([])
    assert (args.model_shape, args.count, args.scale) == ("llama3.1-8b", 64, 1)


@pytest.mark.parametrize("name", runs.COUNTS)
def test_other_work_is_reported_and_fails_the_benchmark(name, monkeypatch, capsys):
    def serve(backend, folder, args):
        planted = {name: 5} if backend == "prefix" else {}
        return iter([row("judge", backend, 1.0), row("document_qa", backend, 1.0, **planted)])

    monkeypatch.setattr(bench_agents, "_serve", serve)
    argv = ["--device", "cpu", "--backends", "torch_native,triton"]
    assert bench_agents.main(argv) == 0
    assert bench_agents.main([*argv[:-1], "torch_native,prefix"]) == 1
    err = capsys.readouterr().err
    assert f"not the same work: document_qa: 5 {name.replace('_', ' ')} with prefix" in err
    assert "judge" not in err


def test_one_backend_that_fails_does_not_stop_the_others(monkeypatch, capsys, tmp_path):
    def serve(backend, folder, args):
        if backend == "prefix":
            raise bench_agents.ServerError("no such thing:\nthe last line")
        yield row("judge", backend, 1.0)

    monkeypatch.setattr(bench_agents, "_serve", serve)
    out = tmp_path / "agents.json"
    argv = ["--device", "cpu", "--backends", "prefix,triton", "--json", str(out)]
    assert bench_agents.main(argv) == 1
    said = capsys.readouterr()
    assert "prefix: no such thing:\nthe last line" in said.err and "| judge | 1.00 s" in said.out
    assert report.main([str(out)]) == 0
    assert "| judge | 1.00 s (1.000) |" in capsys.readouterr().out


def test_ratios_are_to_the_fastest_stock_backend_of_each_program():
    rows = [
        *(row("judge", "default", wall) for wall in (9.0, 4.0, 5.0)),
        *(row("judge", "flashinfer", wall) for wall in (4.0, 4.0, 9.0)),
        *(row("judge", "fa3/prefix:portable", wall) for wall in (2.0, 9.0, 1.0)),
        row("document_qa", "default", 2.0),
        row("document_qa", "fa3/prefix:portable", 4.0),
    ]
    ratios = agent_tables.wall_ratios(rows)
    assert ratios["judge", "default"] == 1.25 and ratios["judge", "flashinfer"] == 1.0
    assert ratios["judge", "fa3/prefix:portable"] == 0.5
    assert ratios["document_qa", "fa3/prefix:portable"] == 2.0
    text = agent_tables.markdown(rows)
    assert "| judge | 5.00 s (1.250) | 4.00 s (1.000) | 2.00 s (0.500) |" in text
    assert "| document_qa | 2.00 s (1.000) | - | 4.00 s (2.000) |" in text
    assert "| geometric mean | 1.118 | - | 1.000 |" in text
    only_ours = [row("judge", "prefix", 2.0), row("judge", "prefix:portable", 3.0)]
    assert agent_tables.wall_ratios(only_ours)["judge", "prefix:portable"] == 1.5


def test_help(capsys):
    with pytest.raises(SystemExit) as stop:
        bench_agents.main(["--help"])
    assert stop.value.code == 0 and "python -m eval.bench_agents" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--device=cpu", "--programs=judge,nope"], "--programs: 'nope'"),
        (["--device=cpu", "--programs=judge,judge"], "--programs: names one twice"),
        (["--device=cpu", "--backends=fa3,fa3"], "--backends: names one twice"),
        (["--device=cpu", "--count=0"], "--count"),
        ([], "argument --device: torch "),
    ],
)
def test_bad_arguments_end_with_usage(argv, says, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        bench_agents.main(argv)
    assert stop.value.code == 2 and says in capsys.readouterr().err.split("error:")[1]
