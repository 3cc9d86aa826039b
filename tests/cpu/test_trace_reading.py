"""Traces of every format, good lines and bad ones."""

from dataclasses import replace

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_prefix_attn.analyze import sglang_log, trace_file, trace_lines
from sgl_prefix_attn.analyze.trace import block_names

TEXT_LINE = (
    "[2026-11-22 10:00:10] Finish: obj=GenerateReqInput(rid='a', session_id=None, "
    "text={text}, input_ids={ids}, input_embeds=None, sampling_params={{'n': 1}}), "
    "out={{'text': 'It\\'s text=None, input_ids=[1]', 'output_ids': [5, 6], 'meta_info': "
    "{{'id': 'a', 'prompt_tokens': {tokens}, 'completion_tokens': 7, 'e2e_latency': 2.5}}}}"
)


def mooncake(at, prompt, output, ids):
    return orjson.dumps(
        {"timestamp": at, "input_length": prompt, "output_length": output, "hash_ids": ids}
    )


def generic(**fields):
    return orjson.dumps({"output_length": 4} | fields)


def conversation(prompt, answer, **fields):
    turns = [{"content": prompt}, {"content": answer}]
    return orjson.dumps({"conversations": turns} | fields)


def logged(text=None, ids=None, tokens=3):
    """A line of SGLang's log; text and ids as they stand there."""
    return TEXT_LINE.format(text=text, ids=ids, tokens=tokens).encode()


def logged_json(obj, tokens=3):
    meta = {"prompt_tokens": tokens, "completion_tokens": 7, "e2e_latency": 2.5}
    row = {"timestamp": "2026-11-22T10:00:10.5", "event": "request.finished", "rid": "a"}
    return b"[2026-11-22 10:00:10] " + orjson.dumps(row | {"obj": obj, "out": {"meta_info": meta}})


def names_of(trace, i):
    return trace.blocks[trace.first[i] :][: trace.count[i]].tolist()


def shared(trace, i, j):
    """Blocks at the beginning of two requests that have the same names."""
    pairs = zip(names_of(trace, i), names_of(trace, j), strict=False)
    return sum(a == b for a, b in pairs)


def read(*lines):
    return trace_file.read(line + b"\n" for line in lines)


def test_mooncake():
    found = read(
        mooncake(3000, 1100, 5, [7, (1 << 64) - 1, 9]),
        mooncake(1000, 1024, 6, [7, (1 << 64) - 1]),
        mooncake(2000, 1100, 7, [8, (1 << 64) - 1, 9]),
    )
    trace = found.trace
    assert found.bad == found.cut == 0 and trace.has_arrivals
    assert trace.arrival.tolist() == [0, 1, 2]  # in their order, from the first
    assert trace.prompt.tolist() == [1024, 1100, 1100] and trace.output.tolist() == [6, 7, 5]
    assert trace.count.tolist() == [2, 3, 3] and trace.block_tokens == 512
    assert shared(trace, 0, 2) == 2
    # the second block is equal, what stands before it is not
    assert shared(trace, 0, 1) == 0 and len(set(names_of(trace, 1))) == 3


def test_token_ids_share_whole_blocks_and_equal_ends():
    one = list(range(80))
    trace = read(
        generic(prompt=one),
        generic(input_ids=one),
        generic(prompt=[*one[:64], *range(500, 516)]),
        generic(prompt=one[:70]),
    ).trace
    assert trace.prompt.tolist() == [80, 80, 80, 70] and not trace.has_arrivals
    assert shared(trace, 0, 1) == 3  # 32 + 32 + 16
    assert shared(trace, 0, 2) == shared(trace, 0, 3) == 2


def test_text_counts_four_characters_for_a_token():
    text = "é" * 300
    trace = read(generic(prompt=text), generic(text=text[:256] + "x" * 44)).trace
    assert trace.prompt.tolist() == [75, 75] and trace.count.tolist() == [3, 3]
    assert shared(trace, 0, 1) == 2


def test_sglang_s_custom_data():
    trace = read(
        conversation("a" * 130, "b" * 9),
        conversation("a" * 128 + "xy", "", output_len=7),
    ).trace
    assert trace.prompt.tolist() == [33, 33] and trace.output.tolist() == [3, 7]
    assert shared(trace, 0, 1) == 1
    later = read(*(conversation("a", "b", timestamp=at) for at in (500, 0))).trace
    assert later.arrival.tolist() == [0, 0.5]


def test_words_may_be_tokens():
    text = " ".join(f"{i:x}" for i in range(80))
    lines = [conversation(text, "0 0 0"), conversation(text[:-2] + "zz", "0"), generic(text="a b")]
    trace = trace_file.read(lines, words=True).trace
    assert trace.prompt.tolist() == [80, 80, 2] and trace.output.tolist() == [3, 1, 4]
    assert shared(trace, 0, 1) == 2 and shared(trace, 0, 2) == 0


def test_n_samples_are_n_requests():
    trace = read(generic(prompt=[1, 2, 3], n=3, arrival=2.5)).trace
    assert trace.prompt.tolist() == [3] * 3 and shared(trace, 0, 2) == 1
    assert trace.blocks.size == 1


def test_one_request_without_arrival_makes_all_come_at_once():
    trace = read(generic(prompt=[1], arrival=5), generic(prompt=[1])).trace
    assert trace.arrival.tolist() == [0, 0] and not trace.has_arrivals


@pytest.mark.parametrize(
    ("line", "tokens", "prompt"),
    [
        (logged(text=repr('it\'s "so", input_ids=\n'), tokens=6), 6, 'it\'s "so", input_ids=\n'),
        (logged(text=repr("a"), ids="[3, 4, 5]"), 3, [3, 4, 5]),
        (logged(ids="[3, 4, 5]"), 3, [3, 4, 5]),
        (logged_json({"text": "abc", "input_ids": None}), 3, "abc"),
        (logged_json({"text": "abc", "input_ids": [3, 4, 5]}), 3, [3, 4, 5]),
    ],
)
def test_a_finished_request_of_sglang_s_log(line, tokens, prompt):
    found = sglang_log.parse(line)
    assert found.prompt == prompt and found.tokens == tokens
    assert found.output == 7 and not found.is_cut
    request = trace_lines.parse(line)
    assert request.prompt == tokens and request.output == 7
    other = trace_lines.parse(line.replace(b"10:00:10", b"10:00:14"))
    assert other.arrival - request.arrival == 4


@pytest.mark.parametrize(
    "line",
    [
        logged(ids="[" + "7, " * 1023 + "7] ... [" + "8, " * 1023 + "8]", tokens=3000),
        logged(text=f"'{'x' * 1024}' ... '{'y' * 1024}'", tokens=3000),
        logged_json({"input_ids": [*[7] * 1024, "...", *[8] * 1024]}, tokens=3000),
        logged_json({"text": "x" * 1024 + "..." + "y" * 1024}, tokens=3000),
    ],
)
def test_a_prompt_that_the_log_cuts_shares_its_beginning(line):
    found = read(line, line)
    assert found.cut == 2 and found.trace.prompt.tolist() == [3000, 3000]
    blocks = 8 if b"x" * 1024 in line else 32
    assert found.trace.count.tolist() == [blocks, blocks] and shared(found.trace, 0, 1) == blocks


def test_other_lines_of_a_log_are_passed_over():
    found = read(
        b"environ.py:1: UserWarning: before the first line of the log",
        b"[2026-11-22 10:00:09] Receive: obj=GenerateReqInput(rid='a', text='x', input_ids=None)",
        b"[2026-11-22 10:00:09 TP0] Decode batch. #running-req: 2",
        b"Traceback (most recent call last):",
        logged(ids="[3, 4, 5]"),
    )
    assert len(found.trace) == 1 and found.bad == 0


def test_a_stray_line_of_a_log_makes_no_log_of_a_trace():
    found = read(generic(prompt=[1]), b"[2026-11-22 10:00:09] Decode batch.", generic(prompt=[1]))
    assert len(found.trace) == 2 and found.bad == 1


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{", "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b"[1]", "no JSON object"),
        (b"{}", "neither hash_ids nor prompt"),
        (b'{"conversations": [{"content": "a"}]}', "no prompt and answer"),
        (b'{"conversations": 5}', "no prompt and answer"),
        (b'{"conversations": [{"content": 5}, {}], "output_len": 1}', "no prompt and answer"),
        (conversation(5, "a", output_len=1), "neither a list"),
        (mooncake(0, 600, 1, [1]), "1 hash_ids for 600 tokens"),
        (mooncake(0, 600, 1, [1, -2]), "integers of at least 0"),
        (mooncake(0, 600, 1, [1, 2.5]), "integers of at least 0"),
        (mooncake(0, 600, 1, "ab"), "integers of at least 0"),
        (mooncake(0, 600, 1, [[1], [2, 3]]), "integers of at least 0"),
        (mooncake(0, 600, 1, []), "integers of at least 0"),
        (mooncake("0", 600, 1, [1, 2]), "timestamp must be a number"),
        (mooncake(-1, 600, 1, [1, 2]), "arrival at -0.001 s"),
        (mooncake(0, None, 1, [1, 2]), "input_length must be an integer"),
        (mooncake(0, 0, 1, [1, 2]), "0 tokens of prompt"),
        (mooncake(0, 600, 0, [1, 2]), "0 of output"),
        (mooncake(0, 600, 1 << 40, [1, 2]), "2^30"),
        (generic(prompt=[1], n=0), "0 samples"),
        (generic(prompt=[1], n="x"), "n must be an integer"),
        (generic(prompt=[1], arrival="x"), "arrival must be a number"),
        (generic(prompt={}), "neither a list of token ids nor text"),
        (generic(prompt=[]), "one at least"),
        (generic(prompt=""), "0 tokens of prompt"),
        (b'{"prompt": [18446744073709551616], "output_length": 1}', "integers"),
        (b'{"prompt": [true], "output_length": 1}', "integers"),
        (b'{"prompt": 5, "output_length": 1}', "neither a list"),
        (b'{"prompt": [1]}', "output_length must be an integer"),
        (generic(prompt=[1, 2]), "blocks of 32 tokens, those before had 512"),
    ],
)
def test_bad_lines_are_counted_and_shown(line, why):
    good = mooncake(0, 600, 2, [1, 2])
    found = read(good, line, b"", good)
    assert len(found.trace) == 2 and found.bad == 1
    [(number, said)] = found.problems
    assert number == 2 and why in said


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (logged(), "--log-requests-level 2"),
        (logged(ids="[3, 4]").replace(b"text=None, input_ids=[3, 4], ", b""), "level 2"),
        (logged(ids="[3]").replace(b"'completion_tokens': 7, ", b""), "completion_tokens"),
        (logged(ids="[3]")[22:], "without the time"),
        (logged_json({}), "--log-requests-level 2"),
        (logged_json({"text": "a"}).replace(b"meta_info", b"other"), "meta_info"),
        (logged_json({"text": "a"})[:-1], "cannot be read"),
    ],
)
def test_bad_lines_of_a_log(line, why):
    found = read(logged(ids="[3, 4, 5]"), line)
    assert len(found.trace) == found.bad == 1
    assert why in found.problems[0][1]


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(
        [
            mooncake(0, 600, 2, [1, 2]),
            generic(prompt=[1, 2, 3], arrival=1, n=2),
            logged(text="'ab\\\\x41'", tokens=5),
            logged(ids="[3, 4]"),
            logged_json({"input_ids": [1, 2], "text": "a"}),
        ]
    ),
    st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=4)), min_size=1, max_size=4),
)
def test_no_damage_to_a_line_stops_the_reading(line, damages):
    for place, inserted in damages:
        line = line[:place] + inserted + line[place + len(inserted) // 2 + 1 :]
    found = read(mooncake(0, 600, 2, [1, 2]), line)
    assert len(found.trace) >= 1 and found.bad <= 1


def test_only_the_first_problems_are_kept():
    found = read(*[b"x"] * 100, mooncake(0, 1, 1, [1]))
    assert found.bad == 100 and [number for number, _ in found.problems] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("lines", [(), (b"",), (b"x", b"y")])
def test_a_file_without_requests_is_refused(lines):
    with pytest.raises(
        ValueError, match="no request" + ("; line 1: no JSON" if any(lines) else "")
    ):
        read(*lines)


def test_block_names_tell_lengths_and_places_apart():
    content = np.arange(64, dtype=np.uint64)
    whole = block_names(content, 32, 64, 32)
    assert block_names(content[:40], 32, 40, 32)[0] == whole[0]
    assert block_names(content[:40], 32, 40, 32)[1] != whole[1]
    assert block_names(np.zeros(64, np.uint64), 32, 64, 32)[0] != whole[0]
    assert block_names(content, 32, 40, 32).size == 2  # no more than the prompt has


def test_a_rate_stretches_arrivals():
    trace = read(*(mooncake(at, 10, 2, [1]) for at in (0, 1000, 9000))).trace
    assert trace.at_rate(0.5).arrival.tolist() == pytest.approx([0, 4 / 9, 4])
    at_once = read(*[generic(prompt=[1])] * 3).trace
    assert at_once.at_rate(2).arrival.tolist() == [0, 0.5, 1]
    nearly = replace(trace, arrival=np.array([0, 0, 1e-320]))  # no factor stretches that
    assert nearly.at_rate(2).arrival.tolist() == [0, 0.5, 1]
    for rate in (1e-12, 1e-310):
        with pytest.raises(ValueError, match=f"--rate {rate:g}: 3 requests would take"):
            trace.at_rate(rate)
