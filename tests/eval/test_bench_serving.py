"""eval.bench_serving: what it asks of servers and client, keeps, and says when they fail.

Server and client are stand-ins on the search path, started like the real ones; the real ones run in
test_serving.py.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from eval import provenance, report, server_process
from eval.bench_serving import __main__ as bench
from eval.bench_serving import client, rates, serving_row
from eval.workloads.catalogue import Choice, build
from eval.workloads.load import Scale
from tests.support.stand_in_server import assert_ended, write_stand_in

LOADS = "2x3:5+2:4,1x4:6+1:3"


@pytest.fixture
def package(tmp_path, monkeypatch):
    package = write_stand_in(tmp_path / "site")
    path = os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    for module in (server_process, client):
        monkeypatch.setattr(module, "_POLL_S", 0.02)
    return package


@pytest.fixture
def run(package, tmp_path):
    """main() with two backends and two loads unless said otherwise: (exit status, rows)."""
    out = tmp_path / "out.json"

    def call(*extra, backends="torch_native,prefix"):
        arguments = ["--device", "cpu", "--model-shape", "tiny", "--json", str(out)]
        status = bench.main([*arguments, "--backends", backends, "--loads", LOADS, *extra])
        return status, provenance.load(out)["rows"] if out.exists() else None

    call.out = out
    return call


def calls(package):
    return [json.loads(line) for line in (package / "calls").read_text().splitlines()]


def value(call, flag):
    return call[call.index(flag) + 1]


@pytest.mark.slow
def test_each_backend_serves_every_load_at_every_rate(run, package, capsys):
    status, rows = run("--rates", "50%,inf,7", "--alternations", "2")
    assert status == 0
    names = ("load", "rate", "backend", "alternation")
    keys = [tuple(row[name] for name in names) for row in rows]
    assert len(set(keys)) == len(keys) == 2 * 3 * 2 * 2
    order = list(dict.fromkeys((row["alternation"], row["backend"]) for row in rows))
    assert order == [(0, "torch_native"), (0, "prefix"), (1, "prefix"), (1, "torch_native")]
    asked = {(row["load"], row["rate"]): row["asked_requests_per_s"] for row in rows}
    # The stand-in serves 3 and 2 requests/s when all come at once.
    loads = LOADS.split(",")
    assert [asked[load, "50%"] for load in loads] == [1.5, 1.0]
    assert [asked[load, r] for load in loads for r in ("inf", "7")] == [None, 7.0] * 2
    sent = Counter(value(call, "--request-rate") for call in calls(package))
    assert sent == {"inf": 8, "7": 8, "1.5": 4, "1": 4}
    assert_ended(package)
    printed = capsys.readouterr().out
    assert "prefix is up after" in printed and "prefix, 2x3:5+2:4 at 50% (3 of 6) ..." in printed


def test_a_row_has_what_client_server_and_log_say(run):
    row = run()[1][0]
    assert (row["load"], row["backend"], row["rate"]) == ("2x3:5+2:4", "torch_native", "inf")
    assert (row["sent"], row["completed"], row["output_tokens"]) == (6, 6, 24)
    assert row["requests_per_s"] == 3.0 and row["output_tokens_per_s"] == 12.0
    assert row["ttft_ms"] == {"mean": 10.0, "p50": 10.0, "p99": 10.0} == row["e2e_ms"]
    assert row["cached_share"] == 0.25
    assert row["attention"]["attention_backend"] == "fa3"
    # Six warm-up requests were before; one the client's. The log is read from the run's begin on.
    assert row["steps"] == {"prefix:r": 1.0} and row["prefix_share"] == 1.0
    assert row["peak_running"] == 7
    # The other one is the stand-in's child, which may still be starting.
    assert row["busy"].keys() <= {"http", sys.executable}


def test_a_load_is_warmed_up_and_then_starts_with_an_empty_cache(run, package):
    run(backends="prefix")
    asked = [path for path in (package / "asked").read_text().split() if path != "/health"]
    turn = ["/flush_cache", "/metrics", "/generate", "/metrics"]  # the third by the client
    assert asked == ["/generate"] * 6 + turn + ["/generate"] * 4 + turn


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_all_processes_end_with_a_call_that_is_ended(package, tmp_path, number):
    (package / "behaviour").write_text("hangs")
    command = [sys.executable, "-m", "eval.bench_serving", "--device", "cpu"]
    command += ["--model-shape", "tiny", "--backends", "prefix", "--loads", LOADS]
    with subprocess.Popen(
        command,
        cwd=provenance.ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # As in a terminal, where whoever runs the tests may have it ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        while not (package / "calls").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(timeout=60) != 0
    assert_ended(package)
    assert_ended(package, "client")


def test_the_client_is_asked_for_exact_requests(run, package):
    run()
    first = calls(package)[0]
    assert value(first, "--dataset-name") == "generated-shared-prefix"
    assert value(first, "--gsp-question-len") == "2" and value(first, "--seed") == "1"
    assert value(first, "--warmup-requests") == "0" and "--cache-report" in first


def test_answers_come_in_one_piece_offline(run, package, capsys):
    rows = run("--rates", "inf,offline", backends="prefix")[1]
    assert [row["rate"] for row in rows] == ["inf", "offline"] * 2
    assert ["--disable-stream" in call for call in calls(package)] == [False, True] * 2
    assert {value(call, "--request-rate") for call in calls(package)} == {"inf"}
    for row in rows[1::2]:
        assert row["ttft_ms"] is row["tpot_ms"] is None and row["e2e_ms"]
    assert capsys.readouterr().out.count("TPOT") == 2


def test_a_client_that_fails_is_told_with_its_log(run, package, capsys):
    (package / "behaviour").write_text("fails")
    status, rows = run()
    assert (status, rows) == (1, None)
    told = capsys.readouterr()
    assert told.out.count("left out: SGLang's client ended with status 1") == 4  # other loads go on
    assert "no such dataset" in told.out and "4 of 4 runs failed" in told.err
    assert_ended(package)


def test_a_run_without_an_answer_has_no_row(run, package, capsys):
    (package / "behaviour").write_text("refused")
    assert run() == (1, None)
    assert "left out: every request failed; the first: refused" in capsys.readouterr().out


def test_a_server_that_dies_under_load_ends_the_client(run, package, capsys):
    (package / "behaviour").write_text("kills the server")
    status, rows = run()
    assert (status, rows) == (1, None)
    error = capsys.readouterr().err
    assert "ended with status 9 while 2x3:5+2:4 was sent" in error and "says hello" in error
    assert_ended(package)
    assert_ended(package, "client")


def test_a_server_that_does_not_start_is_told_with_its_log(run, package, capsys):
    status, rows = run("--server-arguments=--dies")
    assert (status, rows) == (1, None)
    error = capsys.readouterr().err
    assert "ended with status 7 before it was healthy" in error and "the reason why" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rates", "70%"], "argument --rates: 70% is of the run inf"),
        (["--rates", "inf,inf"], "argument --rates: names one twice"),
        (["--rates", "0"], "argument --rates"),
        (["--rates", "x%"], "argument --rates: 'x' is no number"),
        (["--loads", "gps"], "load 'gps': known are"),
        (["--loads", "gsp,gsp"], "argument --loads: names one twice"),
    ],
)
def test_bad_arguments_are_named(capsys, arguments, message):
    with pytest.raises(SystemExit):
        bench.main(["--device", "cpu", *arguments])
    assert message in capsys.readouterr().err


def test_a_share_is_of_the_first_run_of_the_first_backend():
    rows = [
        row_of("prefix", 5.0),
        row_of("default", 10.0, rate="8"),
        row_of("default", 20.0),
        row_of("default", 40.0, alternation=1),
    ]
    assert rates.saturation(rows, "gsp", "default") == 5.0
    assert rates.saturation(rows, "gsp64", "default") is None


def test_rates_of_what_did_not_run_are_left_out():
    assert rates.parse("12.5").resolve(None) == 12.5
    with pytest.raises(ValueError, match="70% of what is not known"):
        rates.parse("70%").resolve(None)
    assert [r.label for r in rates.in_order(list(map(rates.parse, ("70%", "3", "inf"))))] == [
        "inf",
        "3",
        "70%",
    ]


REPORT = {
    "duration": 2.0, "total_input_tokens": 30, "total_output_tokens": 7, "request_throughput": 1.0,
    "output_throughput": 3.5, "output_lens": [4, 0, 3], "errors": ["", "Trace\nRefused: x", ""],
    "server_info": {},
    "cache_report": {"total_cached_tokens": 0, "total_prompt_tokens": 0},
    **{f"{f}_{m}_ms": 1.0 for f in ("mean", "median", "p99")
       for m in ("ttft", "tpot", "itl", "e2e_latency")},
}  # fmt: skip


def test_failed_and_short_answers_are_not_completed():
    row = serving_row.row(REPORT, [3, 4, 5], {}, "", {})
    assert (row["sent"], row["completed"], row["error"]) == (3, 2, "Refused: x")
    assert row["steps"] == {} and row["prefix_share"] is None and row["peak_running"] is None
    assert serving_row.row(REPORT, [4, 4, 3], {}, "", {})["completed"] == 2
    assert "2 of 3 completed (Refused: x)" in serving_row.text(row)


def test_steps_and_bytes_are_what_the_counters_grew_by():
    name = "sglang:prefix_attn_steps_total"
    grown = {
        (name, (("reason", "a"), ("tp_rank", "0"), ("variant", "prefix"))): 3.0,
        (name, (("reason", "b"), ("tp_rank", "0"), ("variant", "stock"))): 1.0,
        ("sglang:prefix_attn_kv_bytes_total", (("kind", "read"),)): 10.0,
        ("sglang:prefix_attn_kv_bytes_total", (("kind", "unique"),)): 0.0,
    }
    log = "Prefill, #running-req: 9\nDecode batch, #running-req: 12, #token: 7"
    lines = [
        f"\n[2026-11-29 21:00:00 TP0] Decode batch, #running-req: {running}, #token: 77, "
        f"cuda graph: True, gen throughput (token/s): {rate:.2f}, #queue-req: 0, "
        for running, rate in ((12, 240.0), (12, 1200.0), (12, 600.0), (4, 9000.0), (12, 0.0))
    ]
    assert serving_row.row(REPORT, [3], {}, log + "".join(lines[:2]), {})["step_ms"] is None
    log += "".join(lines)
    row = serving_row.row(REPORT | {"server_info": None}, [3], grown, log, {})
    assert row["steps"] == {"prefix:a": 3.0, "stock:b": 1.0} and row["prefix_share"] == 0.75
    assert row["kv_bytes"] == {"read": 10.0} and row["peak_running"] == 12
    assert row["step_ms"] == 20.0 and "step 20.00 ms" in serving_row.text(row)
    busy = serving_row.busy({"http": 4.5, "sglang::detokenizer": 1.0}, 5.0)
    assert busy == {"http": 0.9, "sglang::detokenizer": 0.2}
    assert "http busy 90%" in serving_row.text(row | {"busy": busy})


def row_of(backend, tpot, alternation=0, rate="inf", **changes):
    figures = {"mean": tpot, "p50": tpot, "p99": 2 * tpot}
    rates = {"requests_per_s": 100 / tpot, "output_tokens_per_s": 1e5 / tpot}
    return rates | {
        "backend": backend, "load": "gsp", "rate": rate, "alternation": alternation,
        "asked_requests_per_s": None if rate == "inf" else 17.525,
        "sent": 10, "completed": 10, "step_ms": 20.0, "cached_share": 0.5, "prefix_share": None,
        **dict.fromkeys(serving_row.LATENCIES, figures), **changes,
    }  # fmt: skip


@pytest.fixture
def table(tmp_path, capsys):
    def make(rows):
        path = tmp_path / "serving.json"
        settings = {"model_shape": "llama3.1-8b", "max_running": 256, "baseline": "default"}
        meta = provenance.collect("eval.bench_serving", ["--x"], settings=settings)
        provenance.save(path, meta, rows)
        report.main([str(path)])
        return capsys.readouterr().out

    return make


def test_the_report_has_ratios_to_the_first_backend(table):
    rows = [
        row_of("default", 20.0),
        row_of("prefix", 10.0, prefix_share=0.9),
        row_of("default", 30.0, alternation=1),
        row_of("prefix", 9.0, alternation=1, completed=9, prefix_share=0.9),
        row_of("prefix", 5.0, rate="70%"),
    ]
    text = table(rows)
    assert "medians over servers; in brackets the ratio to default" in text
    assert "| gsp | inf | default | 4167 | 25 | 25.00 | 50.00 | 20.00 | 50% | - | all |" in text
    ratio = "(0.380)"  # 9.5 / 25
    times = f"10 {ratio} | 9.50 {ratio} | 19.00 {ratio}"
    assert (
        f"| gsp | inf | prefix | 10556 (2.533) | {times} | 20.00 (1.000) | 50% | 90% | 19 of 20 |"
        in text
    )
    assert "| gsp | 17.5/s (70%) | prefix | 20000 | 5 | 5.00 | 10.00 |" in text
    whole = dict.fromkeys(serving_row.OF_STREAMS)
    offline = [row_of(b, 20.0, rate="offline", asked_requests_per_s=None, **whole)
               for b in ("default", "prefix")]  # fmt: skip
    assert "| gsp | offline | prefix | 5000 (1.000) | - | - | - |" in table([*rows, *offline])
    assert "`serving.json`: " in text and "python -m eval.bench_serving --x" in text


def test_a_file_of_requests_takes_the_client_that_reads_it(package, tmp_path):
    """Which module is started for what; the real one runs in tests/sglang."""
    sender = client.Client(tmp_path / "model", 1000, tmp_path / "runs", 1)
    load = build("tree", Choice(1, 8192, Scale(0.01, 1 / 8)))
    words = sender.command("http://x", load, 2.0, tmp_path / "report")
    assert words[0] == "eval.bench_serving.request_client"
    assert len(Path(value(words, "--dataset-path")).read_text().splitlines()) == 84
    groups = build("gsp", Choice(1, 8192))
    assert sender.command("http://x", groups, 2.0, tmp_path)[0] == "sglang.bench_serving"
