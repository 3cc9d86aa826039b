"""eval.workloads.mooncake: a trace's lines and the first requests of them."""

import json

import pytest

from eval.workloads import mooncake
from eval.workloads.load import Request

LINE = {"timestamp": 0, "input_length": 700, "output_length": 20, "hash_ids": [0, 1]}


def write(tmp_path, rows):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def request(at, tokens=100, output=4, hash_id=0):
    return Request(((hash_id, tokens),), output, at)


def test_a_trace_is_read_in_order_of_arrival(tmp_path):
    path = write(tmp_path, [LINE | {"timestamp": 3000}, LINE | {"output_length": 5}])
    first, second = mooncake.read(path)
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
        mooncake.read(write(tmp_path, [LINE, bad]))


def test_requests_of_one_timestamp_are_spread_to_the_next():
    requests = [request(at, hash_id=i) for i, at in enumerate((0.0, 3.0, 3.0, 3.0, 4.5, 6.0, 6.0))]
    arrivals = mooncake.spread(requests)
    assert [r.at for r in arrivals] == pytest.approx([0, 3, 3.5, 4, 4.5, 6, 6])
    assert [r.parts for r in arrivals] == [r.parts for r in requests]
    assert mooncake.spread([]) == []


def test_the_first_requests_keep_the_trace_s_pace():
    requests = [request(float(at)) for at in (3, 3, 6, 12, 12, 30)]
    first = mooncake.first(requests, 4, longest=1000)
    # Requests of 3, 4.5, 6, 12 until the next at 21: eighteen seconds are four gaps.
    assert [r.at for r in first] == pytest.approx([0, 1.5 / 4.5, 3 / 4.5, 2])


def test_long_requests_are_left_out():
    sizes = [100, 5000, 100, 97, 5000, 100]
    requests = [request(float(at), size) for at, size in enumerate(sizes)]
    first = mooncake.first(requests, 3, longest=104)
    assert [r.input for r in first] == [100, 100, 97]
    assert [r.at for r in first] == pytest.approx([0, 2 * 3 / 5, 3 * 3 / 5])
    with pytest.raises(ValueError, match="4 requests of at most 103 .* the trace has 1"):
        mooncake.first(requests, 3, longest=103)


def test_arrivals_that_have_no_pace_are_refused():
    with pytest.raises(ValueError, match="first 3 requests of the trace arrive all at once"):
        mooncake.first([request(0.0) for _ in range(5)], 2, longest=1000)
