"""eval.bench_trace: windows of a trace, their prompts, replays in turn, figures, the sender."""

import asyncio
import json
import types
from pathlib import Path

import numpy as np
import pytest

from eval import engine_worker
from eval.bench_trace import replay_figures, replays, trace
from eval.bench_trace.ratios import ratios
from eval.bench_trace.replay_figures import place
from eval.bench_trace.trace_tables import metric_cells, ratio_cells

LINE = {"timestamp": 0, "input_length": 700, "output_length": 20, "hash_ids": [0, 1]}


def write(tmp_path, rows):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def request(at, tokens=100, output=4, hashes=(0,)):
    return trace.Request(at, tokens, output, tuple(hashes))


def test_a_trace_is_read_in_order_of_arrival(tmp_path):
    path = write(tmp_path, [LINE | {"timestamp": 3000}, LINE | {"output_length": 5}])
    first, second = trace.read(path)
    assert (first.at, first.output) == (0.0, 5)
    assert second == trace.Request(3.0, 700, 20, (0, 1))


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
    block = trace.scaled_block(0.1)
    assert block == 51 and big.input == 14 * 51 and big.output == 100  # 717 before
    assert (small.input, small.output) == (1, 1)
    assert trace.scale(full, 1.0) == full
    with pytest.raises(ValueError, match="length scale"):
        trace.scale(full, 0.0005)


def test_requests_of_one_timestamp_are_spread_to_the_next():
    requests = [request(at, hashes=[i]) for i, at in enumerate((0.0, 3.0, 3.0, 3.0, 4.5, 6.0, 6.0))]
    arrivals = trace.spread(requests)
    assert [r.at for r in arrivals] == pytest.approx([0, 3, 3.5, 4, 4.5, 6, 6])
    assert [r.hashes for r in arrivals] == [r.hashes for r in requests]
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


def test_prompts_share_what_the_hashes_share():
    requests = (request(0, 20, hashes=[0, 1, 2]), request(0, 24, hashes=[0, 3, 2]))
    one, two = trace.prompts(requests, 8, 1024)
    assert [len(one), len(two)] == [20, 24]
    assert one[:8] == two[:8] and one[8:16] != two[8:16] and one[16:] == two[16:20]
    assert trace.prompts(requests[1:], 8, 1024) == [two]
    assert all(128 <= token < 1024 for token in one + two)


def test_engines_replay_the_same_file_in_both_orders(tmp_path):
    asked = []

    def engine(name):
        def ask(op, path):
            asked.append((name, op, json.loads(Path(path).read_text())))
            return {"requests": [name]}

        return types.SimpleNamespace(ask=ask)

    engines = {name: engine(name) for name in "abc"}
    window = trace.Window((request(0.0, 10), request(1.5, 12, 3)), 0)
    path = replays.write_requests(tmp_path / "1.json", window, 16, 1024)
    replays.warm_up(engines, path)
    assert [name for name, *_ in asked] == ["a", "b", "c"]
    replayed = list(replays.alternate(engines, path, 2))
    assert replayed == [
        (name, i, [name]) for i, order in enumerate(("abc", "cba")) for name in order
    ]
    assert {op for _, op, _ in asked} == {"replay"} and len(asked) == 9
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
    figures = replay_figures.summarize([row])[0]["ttft_ms"]
    assert figures["p99_is"] is None and metric_cells(figures) == ("-", "-")


def replay(backend, rate, median, p99):
    times, each = {"median": median, "p90": p99, "p99": p99}, [median, median, p99]
    return {
        "backend": backend, "rate": rate, "sent": 3, "completed": 3, "achieved_rate": rate,
        "input_tokens": 100, "cached_tokens": 20,
        "ttft_ms": times, "tpot_ms": times, "late_ms": {"p99": 1.0},
        "each": {"ttft_ms": each, "tpot_ms": each},
    }  # fmt: skip


def test_summary_compares_with_the_first_backend_at_the_same_rate():
    rows = []
    for median, p99 in ((10.0, 30.0), (12.0, 50.0), (11.0, 40.0)):
        rows += [
            replay("stock", 1.0, median, p99), replay("ours", 1.0, 2 * median, p99 + 11),
            replay("low", 1.0, median, p99 - 11), replay("stock", 2.0, 100.0, 300.0),
        ]  # fmt: skip
    entries = {(e["rate"], e["backend"]): e["ttft_ms"] for e in replay_figures.summarize(rows)}
    ours = entries[1.0, "ours"]
    assert ours["ratios"]["median"].value == pytest.approx(2.0)
    assert ours["stock_p99"] == [30.0, 50.0]
    assert (ours["p99"], ours["p99_is"]) == (51.0, "above")
    assert entries[1.0, "low"]["p99_is"] == "below"
    # The ends of a range are inside.
    assert [place(v, 1.0, 2.0) for v in (0.9, 1.0, 2.0, 2.1)] == ["below", *["inside"] * 2, "above"]
    assert entries[1.0, "stock"]["p99_is"] == "inside"
    assert entries[2.0, "stock"]["ratios"] is None
    # A rate that stock did not replay has no ratio.
    figures = replay_figures.summarize([rows[0], replay("ours", 9.0, 1.0, 1.0)])[1]["ttft_ms"]
    assert figures["median"] == 1.0 and metric_cells(figures) == ("1.00 ms", "1.0 ms")
    assert figures["ratios"] is None and ratio_cells(figures) == ("-", "-", "-")


def test_the_median_is_of_all_requests_of_all_replays():
    """Two of three replays coalesce a burst otherwise than the third."""
    rows = [replay("stock", 1.0, 10.0, 30.0) for _ in range(3)]
    for row, each in zip(rows, ([1.0, 2.0, 9.0], [3.0, 8.0, 9.0], [3.0, 8.0, 9.0]), strict=True):
        row["each"]["ttft_ms"] = each
    (entry,) = replay_figures.summarize(rows)
    assert entry["ttft_ms"]["median"] == 8.0
    rows[0]["each"]["ttft_ms"] = [1.0, 2.0, 2.5]
    rows[1] |= {"input_tokens": 300, "cached_tokens": 180, "sent": 2}
    (entry,) = replay_figures.summarize(rows)
    assert entry["ttft_ms"]["median"] == 3.0
    assert entry["cached_share"] == pytest.approx(220 / 500) and entry["least_sent"] == 2


def test_each_request_is_paired_with_its_own_times_on_stock():
    """A request that another place in its burst slowed tenfold is one ratio among others."""
    rows = []
    for slow in (1.0, 1.0, 10.0):
        rows += [replay("stock", 1.0, 1.0, 1.0), replay("ours", 1.0, 1.0, 1.0)]
        rows[-2]["each"]["ttft_ms"] = [100.0, 200.0, 300.0 * slow, 50.0]
        rows[-1]["each"]["ttft_ms"] = [102.0 * slow, 206.0, 303.0, None]
    ours = replay_figures.summarize(rows)[1]
    assert ours["ttft_ms"]["ratios"]["each"].value == pytest.approx(1.02)  # of 1.02, 1.03, 1.01
    assert ours["ttft_ms"]["ratios"]["median"].value == pytest.approx(206 / 150)
    median, each, _ = ratio_cells(ours["ttft_ms"])
    assert median.startswith("1.373 (") and each.startswith("1.020 (")


def noisy(rng, factor, noise, count=5, requests=40):
    """Times [replays, requests] of 50 to 300 ms times `factor`, each with noise of its own."""
    times = np.linspace(50, 300, requests) * factor
    return times * (1 + noise * rng.standard_normal((count, requests)))


def test_the_interval_holds_the_true_ratio_and_grows_with_the_noise():
    rng = np.random.default_rng(5)
    quiet, loud = (
        ratios(noisy(rng, 1.1, noise), noisy(rng, 1.0, noise)) for noise in (0.001, 0.05)
    )
    for name in ("median", "each", "p99"):
        low, high = quiet[name].interval
        assert 1.09 < low < 1.1 < high < 1.11, name
        wide = loud[name].interval
        assert wide[0] < 1.1 < wide[1] and wide[1] - wide[0] > 5 * (high - low), name
    # A slow replay widens the interval, not the ratio of each request.
    ours, stock = noisy(rng, 1.0, 0.001), noisy(rng, 1.0, 0.001)
    ours[3:] *= 1.5
    each = ratios(ours, stock)["each"]
    assert each.value == pytest.approx(1.0, abs=0.01) and each.interval[1] > 1.4


def test_what_a_ratio_needs():
    """Two replays for an interval, a request that both completed for a ratio of its own."""
    a, b = np.array([[2.0, np.nan]]), np.array([[1.0, 4.0]])
    assert str(ratios(a, b)["each"]) == "2.000" and ratios(a, b)["each"].interval is None
    apart = ratios(a, np.array([[np.nan, 4.0]]))
    assert apart["each"] is None and apart["median"].value == 0.5
    nothing = ratios(np.full((3, 2), np.nan), b)
    assert nothing == {"median": None, "each": None, "p99": None}
    # A replay of which nothing completed is left out.
    assert str(ratios(np.array([[np.nan, np.nan], [2.0, 8.0]]), b)["p99"]) == "2.000"


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
