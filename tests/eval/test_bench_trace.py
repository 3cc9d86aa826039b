"""eval.bench_trace: windows of a trace, their prompts, replays in turn, figures, the sender."""

import asyncio
import json
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from eval import engine_worker
from eval.bench_trace import __main__ as bench_trace
from eval.bench_trace import replay_figures, trace
from eval.bench_trace.replay_figures import ratio
from eval.engine_process import EngineError
from eval.workloads.load import Request
from tests.eval.fake_engines import fake_engines

LINE = {"timestamp": 0, "input_length": 700, "output_length": 20, "hash_ids": [0, 1]}


def write(tmp_path, rows):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def request(at, tokens=100, output=4, hashes=(0,)):
    return Request(trace.in_blocks(hashes, tokens), output, at)


def test_a_trace_is_read_in_order_of_arrival(tmp_path):
    path = write(tmp_path, [LINE | {"timestamp": 3000}, LINE | {"output_length": 5}])
    first, second = trace.read(path)
    assert (first.at, first.output) == (0.0, 5)
    assert second == Request(((0, 512), (1, 188)), 20, 3.0)


@pytest.mark.parametrize(
    "bad",
    [
        {"timestamp": 1}, LINE | {"hash_ids": [0]}, LINE | {"hash_ids": ["a", "b"]},
        LINE | {"output_length": 0}, LINE | {"timestamp": "x"}, [],
    ],
)  # fmt: skip
def test_a_bad_line_is_named(tmp_path, bad):
    with pytest.raises(ValueError, match=r"trace\.jsonl, line 2: expected"):
        trace.read(write(tmp_path, [LINE, bad]))


def test_a_scaled_prompt_fits_its_blocks():
    full = [request(0.0, 14 * 512, 1000, range(14)), request(0.0, 1, 1, [7])]
    big, small = trace.scale(full, 0.1)
    assert big.parts == tuple((i, 51) for i in range(14)) and big.output == 100  # 717 before
    assert (small.input, small.output) == (1, 1)
    assert trace.scale(full, 1.0) == full
    with pytest.raises(ValueError, match="length scale"):
        trace.scale(full, 0.0005)


def test_requests_of_one_timestamp_are_spread_to_the_next():
    requests = [request(at, hashes=[i]) for i, at in enumerate((0.0, 3.0, 3.0, 3.0, 4.5, 6.0, 6.0))]
    arrivals = trace.spread(requests)
    assert [r.at for r in arrivals] == pytest.approx([0, 3, 3.5, 4, 4.5, 6, 6])
    assert [r.parts for r in arrivals] == [r.parts for r in requests]
    assert trace.spread([]) == []


def test_a_window_has_the_rate_and_the_trace_s_pace():
    requests = [request(float(at)) for at in (0, 3, 3, 6, 12, 12, 30)]
    window = trace.window(requests, rate=2.0, seconds=2.0, skip=1.0, longest=1000)
    # Four requests of 3, 4.5, 6, 12 until the next at 21: eighteen seconds become two.
    assert [r.at for r in window.requests] == pytest.approx([0, 1.5 / 9, 3 / 9, 1])
    assert window.skipped == 0
    slower = trace.window(requests, rate=1.0, seconds=4.0, skip=1.0, longest=1000)
    assert [r.at for r in slower.requests] == pytest.approx([2 * r.at for r in window.requests])


def test_long_requests_are_left_out_and_counted():
    sizes = [100, 5000, 100, 97, 5000, 100]
    requests = [request(float(at), size) for at, size in enumerate(sizes)]
    window = trace.window(requests, rate=1.0, seconds=3.0, skip=0.0, longest=104)
    assert [r.input for r in window.requests] == [100, 100, 97] and window.skipped == 2
    assert window.requests[-1].at == pytest.approx(3 * 3 / 5)
    with pytest.raises(ValueError, match="needs 4 requests.* has 1"):
        trace.window(requests, rate=1.0, seconds=3.0, skip=0.0, longest=103)


@pytest.mark.parametrize(
    ("times", "rate", "says"),
    [([0.0] * 5, 1.0, "all at once"), ([0.0, 1.0], 0.1, "not one request")],
)
def test_windows_that_cannot_be(times, rate, says):
    with pytest.raises(ValueError, match=says):
        trace.window([request(at) for at in times], rate, 2.0, 0.0, 1000)


def test_prompts_share_what_the_hashes_share(tmp_path):
    both = (request(0, 1200, hashes=[0, 1, 2]), request(0, 1300, hashes=[0, 3, 2]))
    args = types.SimpleNamespace(model_shape="tiny")

    def written(*requests):
        path = bench_trace.write_requests(tmp_path / "r.json", trace.Window(requests, 0), args)
        return [row["ids"] for row in json.loads(path.read_text())]

    one, two = written(*both)
    assert [len(one), len(two)] == [1200, 1300]
    assert one[:512] == two[:512] and one[512:1024] != two[512:1024]
    assert one[1024:] == two[1024:1200]
    assert written(both[1]) == [two] and all(0 <= token < 1024 for token in one + two)


def test_engines_replay_the_same_file_in_both_orders(tmp_path, monkeypatch):
    asked = []

    def ask(name, op, path):
        asked.append((name, op, json.loads(Path(path).read_text())))
        return {"requests": [name]}

    fake_engines(monkeypatch, ask, pool_tokens=640)
    window = trace.Window((request(0.0, 10), request(1.5, 12, 3)), 0)
    names = ("backend", "rate", "alternation", "window", "timed")
    monkeypatch.setattr(
        bench_trace.replay_figures, "row", lambda *replay: dict(zip(names, replay, strict=True))
    )
    args = types.SimpleNamespace(
        model_shape="tiny", length_scale=1 / 32, pool_tokens=640, backends=list("abc"),
        device=torch.device("cpu"), alternations=2,
    )  # fmt: skip
    rows = list(bench_trace._run(tmp_path, args, {1.0: window}))
    assert [name for name, *_ in asked[:3]] == ["a", "b", "c"], "warm-up"
    replayed = [(row["backend"], row["alternation"], row["timed"]) for row in rows]
    assert replayed == [
        (name, i, [name]) for i, order in enumerate(("abc", "cba")) for name in order
    ]
    assert {op for _, op, _ in asked} == {"replay"} and len(asked) == 9
    args.pool_tokens = 704
    with pytest.raises(EngineError, match="a has room for 640 KV tokens only"):
        list(bench_trace._run(tmp_path, args, {1.0: window}))
    for _, _, sent in asked:
        lengths = [(r["at"], len(r["ids"]), r["new_tokens"]) for r in sent]
        assert lengths == [(0.0, 10, 4), (1.5, 12, 3)] and sent == asked[0][2]


def timed(sent, first, last, tokens, error=None):
    return {
        "sent": sent, "first": first, "last": last, "tokens": tokens, "cached": 8, "error": error
    }  # fmt: skip


def test_figures_of_a_replay():
    sizes = ((0.0, 10, 5), (1.0, 20, 1), (2.0, 30, 3), (3.0, 40, 3))
    window = trace.Window(tuple(request(*size) for size in sizes), 7)
    answer = [
        timed(0.001, 0.5, 0.9, 5),
        timed(1.003, 1.1, 1.1, 1),  # one token: no TPOT
        timed(2.0, 2.9, 9.0, 2),  # cut short
        timed(3.0, None, None, 0, "refused"),
    ]
    row = replay_figures.row("prefix", 1.0, 0, window, answer)
    assert (row["sent"], row["completed"], row["skipped"]) == (4, 2, 7)
    assert row["ttft_ms"]["median"] == pytest.approx(300)
    assert row["ttft_ms"]["p90"] == pytest.approx(460)
    assert row["each"] == {
        "ttft_ms": [500, 100, None, None], "tpot_ms": [100, None, None, None]
    }  # fmt: skip
    assert row["tpot_ms"]["p99"] == pytest.approx(100)
    assert row["late_ms"]["max"] == pytest.approx(3)
    assert row["achieved_rate"] == pytest.approx(2 / 1.1)
    assert (row["input_tokens"], row["output_tokens"], row["cached_tokens"]) == (100, 12, 32)
    assert row["error"] == "refused"


def test_figures_when_nothing_completes():
    refused = timed(0.0, None, None, 0, "refused")
    row = replay_figures.row("prefix", 1.0, 0, trace.Window((request(0.0),), 0), [refused])
    assert row["completed"] == 0 and row["achieved_rate"] == 0.0
    assert row["ttft_ms"] == {"median": None, "p90": None, "p99": None}
    assert row["each"] == {"ttft_ms": [None], "tpot_ms": [None]}
    assert replay_figures.summarize([row])[0]["ttft_ms"] == {"median": None, "ratio": None}
    assert "| 1 | prefix | - | - | - | - |" in replay_figures.markdown([row])


def replay(backend, rate, each):
    return {
        "backend": backend, "rate": rate, "sent": len(each), "completed": len(each),
        "input_tokens": 100, "cached_tokens": 20, "each": {"ttft_ms": each, "tpot_ms": each},
    }  # fmt: skip


def test_summary_compares_with_the_first_backend_at_the_same_rate():
    rows = []
    for median in (10.0, 12.0, 11.0):
        rows += [
            replay("stock", 1.0, [median] * 3), replay("ours", 1.0, [2 * median] * 3),
            replay("stock", 2.0, [100.0] * 3), replay("ours", 9.0, [1.0] * 3),
        ]  # fmt: skip
    entries = {(e["rate"], e["backend"]): e["ttft_ms"] for e in replay_figures.summarize(rows)}
    assert entries[1.0, "ours"]["ratio"].value == pytest.approx(2.0)
    assert entries[1.0, "stock"]["ratio"] is entries[2.0, "stock"]["ratio"] is None
    assert entries[9.0, "ours"] == {"median": 1.0, "ratio": None}, "stock did not replay it"
    text = replay_figures.markdown(rows)
    assert "| 1 | stock | 11.00 | 11.00 | - | - | 20.0 % | 9 of 9 |" in text
    interval = "2.000 (1.667 to 2.400)"  # 20 / 12 to 24 / 10
    assert f"| 1 | ours | 22.00 | 22.00 | {interval} | {interval} | 20.0 % | 9 of 9 |" in text


def test_the_median_is_of_all_requests_of_all_replays():
    """Two of three replays coalesce a burst otherwise than the third."""
    eaches = ([1.0, 2.0, 9.0], [3.0, 8.0, 9.0], [3.0, 8.0, 9.0])
    rows = [replay("stock", 1.0, each) for each in eaches]
    (entry,) = replay_figures.summarize(rows)
    assert entry["ttft_ms"]["median"] == 8.0
    rows[0]["each"]["ttft_ms"] = [1.0, 2.0, 2.5]
    rows[1] |= {"input_tokens": 300, "cached_tokens": 180, "completed": 2}
    (entry,) = replay_figures.summarize(rows)
    assert entry["ttft_ms"]["median"] == 3.0
    assert entry["cached_share"] == pytest.approx(220 / 500)
    assert (entry["sent"], entry["completed"]) == (9, 8)


def test_each_request_is_paired_with_its_own_times_on_stock():
    """A request that another place in its burst slowed tenfold is one ratio among others."""
    rows = []
    for slow in (1.0, 1.0, 10.0):
        rows.append(replay("stock", 1.0, [100.0, 200.0, 300.0 * slow, 50.0]))
        rows.append(replay("ours", 1.0, [102.0 * slow, 206.0, 303.0, None]))
    ours = replay_figures.summarize(rows)[1]
    assert ours["ttft_ms"]["ratio"].value == pytest.approx(1.02)  # of 1.02, 1.03, 1.01
    assert str(ours["ttft_ms"]["ratio"]).startswith("1.020 (")


def noisy(rng, factor, noise, count=5, requests=40):
    """Times [replays, requests] of 50 to 300 ms times `factor`, each with noise of its own."""
    times = np.linspace(50, 300, requests) * factor
    return times * (1 + noise * rng.standard_normal((count, requests)))


@pytest.mark.slow
def test_the_interval_holds_the_true_ratio_and_grows_with_the_noise():
    rng = np.random.default_rng(5)
    quiet, loud = (
        ratio(noisy(rng, 1.1, noise), noisy(rng, 1.0, noise)).interval for noise in (0.001, 0.05)
    )
    assert 1.09 < quiet[0] < 1.1 < quiet[1] < 1.11
    assert loud[0] < 1.1 < loud[1] and loud[1] - loud[0] > 5 * (quiet[1] - quiet[0])
    # A slow replay widens the interval, not the ratio of each request.
    ours, stock = noisy(rng, 1.0, 0.001), noisy(rng, 1.0, 0.001)
    ours[3:] *= 1.5
    found = ratio(ours, stock)
    assert found.value == pytest.approx(1.0, abs=0.01) and found.interval[1] > 1.4


def test_what_a_ratio_needs():
    """Two replays for an interval, a request that both completed for a ratio of its own."""
    a, b = np.array([[2.0, np.nan]]), np.array([[1.0, 4.0]])
    assert str(ratio(a, b)) == "2.000" and ratio(a, b).interval is None
    assert ratio(a, np.array([[np.nan, 4.0]])) is None
    assert ratio(np.full((3, 2), np.nan), b) is None
    # A replay of which nothing completed is left out.
    assert str(ratio(np.array([[np.nan, np.nan], [2.0, 8.0]]), b)) == "2.000"


class Manager:
    """Two tokens for a request; refuses one of three tokens."""

    def __init__(self, flushes=True):
        self.flushes, self.events = flushes, []

    async def flush_cache(self, timeout_s):
        self.events.append("flush")
        return types.SimpleNamespace(success=self.flushes, message="busy")

    async def generate_request(self, request, _):
        self.events.append(request["name"])
        if request["name"] == "refused":
            raise ValueError("too long")
        for count in (1, 2):
            await asyncio.sleep(0.02)
            yield {"output_ids": [0] * count, "meta_info": {"cached_tokens": 6}}


def send(manager, requests, monkeypatch):
    monkeypatch.setattr(engine_worker, "_greedy", lambda request: request)
    engine = types.SimpleNamespace(tokenizer_manager=manager)
    return asyncio.run(engine_worker._all_timed(engine, requests))


def test_requests_are_sent_in_time_from_an_empty_cache(monkeypatch):
    requests = [{"name": name, "at": at} for name, at in (("a", 0.0), ("b", 0.1), ("refused", 0.2))]
    manager = Manager()
    a, b, refused = send(manager, requests, monkeypatch)
    assert manager.events == ["flush", "a", "b", "refused"]
    early = 1e-3  # SGLang's event loop counts in milliseconds
    assert a["sent"] >= -early and b["sent"] >= 0.1 - early and refused["sent"] >= 0.2 - early
    assert a["sent"] < a["first"] < a["last"] and (a["tokens"], a["cached"]) == (2, 6)
    assert refused["error"] == "too long" and refused["first"] is None


def test_requests_of_one_time_are_sent_in_their_order(monkeypatch):
    manager, names = Manager(), [str(i) for i in range(50)]
    answers = send(manager, [{"name": name, "at": 0.05} for name in names], monkeypatch)
    assert manager.events == ["flush", *names]
    assert [answer["tokens"] for answer in answers] == [2] * 50


def test_a_cache_that_is_not_flushed_is_an_error(monkeypatch):
    with pytest.raises(RuntimeError, match="not flushed: busy"):
        send(Manager(flushes=False), [], monkeypatch)
