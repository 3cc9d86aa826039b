"""Traces of every format, good lines and bad ones."""

import gzip

import numpy as np
import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sgl_prefix_attn.tools.analyze import sglang_log, trace_file, trace_lines
from sgl_prefix_attn.tools.analyze.blocks import block_names
from sgl_prefix_attn.tools.analyze.containers import decompressed
from sgl_prefix_attn.tools.analyze.trace_lines import Options
from tests.support.examples import examples

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


def chat(*messages, **fields):
    return orjson.dumps({"messages": messages, "max_tokens": 4} | fields)


def logged(text=None, ids=None, tokens=3):
    """A line of SGLang's log; text and ids as they stand there."""
    return TEXT_LINE.format(text=text, ids=ids, tokens=tokens).encode()


def logged_json(obj, tokens=3):
    meta = {"prompt_tokens": tokens, "completion_tokens": 7, "e2e_latency": 2.5}
    row = {"timestamp": "2026-11-22T10:00:10.5", "event": "request.finished", "rid": "a"}
    return b"[2026-11-22 10:00:10] " + orjson.dumps(row | {"obj": obj, "out": {"meta_info": meta}})


@pytest.mark.parametrize("line", [logged("'1'"), logged_json({"text": "1"})])
def test_probes_of_a_server_s_health_are_no_requests(line):
    assert sglang_log.parse(line) is not None
    probe = line.replace(b"'a'", b"'HEALTH_CHECK_1'").replace(b'"a"', b'"HEALTH_CHECK_1"')
    assert probe != line and sglang_log.parse(probe) is None


def names_of(trace, i):
    return trace.blocks[trace.first[i] :][: trace.num_blocks[i]].tolist()


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
    assert found.bad == 0 and trace.has_arrivals
    assert trace.arrival.tolist() == [0, 1, 2]  # in their order, from the first
    assert trace.prompt.tolist() == [1024, 1100, 1100] and trace.output.tolist() == [6, 7, 5]
    assert trace.num_blocks.tolist() == [2, 3, 3] and trace.block_tokens == 512
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
    assert trace.prompt.tolist() == [75, 75] and trace.num_blocks.tolist() == [3, 3]
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
    trace = trace_file.read(lines, Options(words=True)).trace
    assert trace.prompt.tolist() == [80, 80, 2] and trace.output.tolist() == [3, 1, 4]
    assert shared(trace, 0, 1) == 2 and shared(trace, 0, 2) == 0


def test_n_samples_are_n_requests():
    trace = read(generic(prompt=[1, 2, 3], n=3, arrival=2.5)).trace
    assert trace.prompt.tolist() == [3] * 3 and shared(trace, 0, 2) == 1
    assert trace.blocks.size == 1


def test_most_requests_are_like_the_first():
    first = generic(prompt=[1, 2])
    later = [generic(prompt=[1, 2], arrival=i) for i in range(2)]
    assert read(first, first, *later).bad == 2
    with pytest.raises(
        ValueError, match="2 requests have a prompt and an arrival, 1 like the first"
    ):
        read(first, *later)


def test_events_without_a_time_before_them_are_passed_over():
    line = logged_json({"text": "1"}).partition(b"] ")[2]
    found = read(line.replace(b"request.finished", b"request.received"), line)
    assert found.bad == 0 and found.trace.size == 1


def test_a_request_without_arrival_is_left_out():
    timed = [generic(prompt=[i], arrival=100 * i) for i in range(1, 4)]
    found = read(*timed, generic(prompt=[9]))
    assert found.trace.arrival.tolist() == [0, 100, 200] and found.trace.has_arrivals
    why = "it has a prompt without an arrival, the first a prompt and an arrival"
    assert found.problems == ((4, why),)


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
    assert found.trace.prompt.tolist() == [3000, 3000]
    assert found.notes[0].startswith("2 prompts are logged in part")
    blocks = 8 if b"x" * 1024 in line else 32
    assert (
        found.trace.num_blocks.tolist() == [blocks, blocks] and shared(found.trace, 0, 1) == blocks
    )


@pytest.mark.parametrize("characters", [2, 3, 4, 4.5, 7])
@pytest.mark.parametrize("options", [Options(), Options(words=True)], ids=["characters", "words"])
def test_what_a_log_s_prompts_share_hangs_on_no_guess_of_their_tokens(characters, options):
    """4000 tokens that all share, and 400 of each request's own, at its end."""
    rng = np.random.default_rng(0)

    def words(tokens):
        return "".join(f"{word:04x} " for word in rng.integers(1 << 16, size=int(tokens)))

    size = 5 if options.words else 1  # words are of five characters here
    count = characters * size / 5
    common = words(4000 * count)
    lines = [logged_json({"text": common + words(400 * count)}, tokens=4400) for _ in range(100)]
    trace = trace_file.read(lines, options).trace
    assert set(trace.prompt.tolist()) <= set(range(4390, 4410))
    assert all(abs(shared(trace, 0, i) - 4000 // 32) <= 2 for i in range(1, 100))


def test_texts_of_hardly_a_character_a_token():
    """As where most of a prompt is an image; and of no word at all."""
    few = trace_file.read([logged_json({"text": "what?"}, tokens=2000)] * 2)
    assert few.bad == 0 and few.trace.prompt.tolist() == [2000] * 2 and shared(few.trace, 0, 1) == 5
    none = trace_file.read([logged_json({"text": " "}, tokens=3)], Options(words=True))
    assert none.trace.prompt.tolist() == [3] and not none.notes


def test_texts_and_token_ids_of_one_log():
    text = "".join(map(str, range(4000)))
    lines = [logged_json({"text": text}, tokens=len(text) // 2)] * 2
    lines += [logged_json({"input_ids": [*range(96)]}, tokens=96)] * 2
    found = trace_file.read(lines)
    assert found.trace.prompt.tolist() == [len(text) // 2] * 2 + [96] * 2
    assert shared(found.trace, 2, 3) == 3 and shared(found.trace, 0, 2) == 0
    assert found.notes == ("2.00 characters of text for a token, as the log counts them",)


def test_other_lines_of_a_log_are_passed_over():
    found = read(
        b"environ.py:1: UserWarning: before the first line of the log",
        b"[2026-11-22 10:00:09] Receive: obj=GenerateReqInput(rid='a', text='x', input_ids=None)",
        b"[2026-11-22 10:00:09 TP0] Decode batch. #running-req: 2",
        b"Traceback (most recent call last):",
        logged(ids="[3, 4, 5]"),
    )
    assert found.trace.size == 1 and found.bad == 0


def test_a_stray_line_of_a_log_makes_no_log_of_a_trace():
    found = read(generic(prompt=[1]), b"[2026-11-22 10:00:09] Decode batch.", generic(prompt=[1]))
    assert found.trace.size == 2 and found.bad == 1


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{", "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b"[1]", "no JSON object"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens", "no JSON but CSV"),
        (b"{}", "it has none of hash_ids, body, messages, conversations, prompt"),
        (b'{"conversations": [{"content": "a"}]}', "no prompt and answer"),
        (b'{"conversations": 5}', "no prompt and answer"),
        (b'{"conversations": [{"content": 5}, {}], "output_len": 1}', "no prompt and answer"),
        (conversation(5, "a", output_len=1), "neither a list"),
        (mooncake(0, 600, 1, [1, -2]), "integers of at least 0"),
        (mooncake(0, 600, 1, [1, 2.5]), "integers of at least 0"),
        (mooncake(0, 600, 1, "ab"), "integers of at least 0"),
        (mooncake(0, 600, 1, [[1], [2, 3]]), "integers of at least 0"),
        (mooncake(0, 600, 1, []), "integers of at least 0"),
        (mooncake("0", 600, 1, [1, 2]), "timestamp must be a number"),
        (mooncake(-1, 600, 1, [1, 2]), "arrival at -0.001 s"),
        (mooncake(0, None, 1, [1, 2]), "input_length must be an integer"),
        (mooncake(0, 600, None, [1, 2]), "no answer, nor any of output_length, output_len, output"),
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
        (b'{"prompt": [1]}', "no answer, nor any of output_length"),
        (b'{"prompt": [1], "output_tokens": []}', "output_tokens must be an integer"),
        (
            generic(prompt=[1], arrival=1),
            "has a prompt and an arrival, the first hash_ids and an",
        ),
        (b"[" * 100_000, "no JSON: depth limit exceeded"),
        (b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "depth limit exceeded"),
        (b'{"body": ' * 500 + b"1" + b"}" * 500, "its body is no request"),
        (b'{"body": 5}', "its body is no request"),
        (chat({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}), "an image"),
        (chat({"content": "a"}), "its messages are not roles and text"),
        (b'{"messages": 5}', "its messages are not roles and text"),
        (chat({"role": "user", "content": "a"}, max_tokens=None), "no answer, nor any of"),
    ],
)
def test_bad_lines_are_counted_and_shown(line, why):
    good = mooncake(0, 600, 2, [1, 2])
    found = read(good, line, b"", good)
    assert found.trace.size == 2 and found.bad == 1
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
    assert found.trace.size == found.bad == 1
    assert why in found.problems[0][1]


@examples(300)
@example(mooncake(0, 600, 2, [1, 2]), [(31, b"")])
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
    # Ten, so that another length in one line does not leave open what a hash id stands for.
    found = read(*[mooncake(0, 600, 2, [1, 2])] * 10, line)
    assert found.trace.size >= 10 and found.bad <= 1


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


def hashed(block, *requests, **fields):
    """(prompt, ids) -> rows with an id for every `block` tokens that a prompt begins."""
    rows = []
    for i, (prompt, shared) in enumerate(requests):
        ids = [j if j < shared else 1000 * i + j for j in range(-(-prompt // block))]
        rows.append({"timestamp": i, "input_length": prompt, "output_length": 9, "hash_ids": ids})
    return [orjson.dumps(row | fields) for row in rows]


@pytest.mark.parametrize("block", [16, 64, 512, 48])
def test_the_block_size_follows_from_lengths_and_hash_ids(block):
    # 3 blocks and a half, all shared but the last; the longest tell 48 from 47 and 49.
    whole = [(100 * block, 2), (100 * block - block // 2, 2), (99 * block + 1, 2)]
    found = read(*hashed(block, (3 * block + block // 2, 3), (3 * block + 1, 3), *whole))
    trace = found.trace
    assert trace.block_tokens == block and trace.num_blocks[:2].tolist() == [4, 4]
    assert shared(trace, 0, 1) == 3 and shared(trace, 0, 2) == 2
    assert found.notes[0].startswith(f"{block} tokens behind a hash id, as input_length")
    assert found.bad == 0


def test_a_request_with_other_blocks_is_left_out():
    rows = [*hashed(64, *[(6400 + i, 3) for i in range(20)]), mooncake(0, 640, 5, [1, 2])]
    found = trace_file.read(rows)
    assert found.trace.block_tokens == 64 and found.trace.size == 20
    assert found.notes[1:] == ("1 requests whose hash_ids do not fit 64 tokens, left out",)


def test_hash_ids_of_no_size_are_refused():
    rows = [mooncake(0, 1000 * n, 5, list(range(n * n))) for n in range(1, 10)]
    with pytest.raises(ValueError, match="157.9 on average, but no size fits"):
        read(*rows)


@pytest.mark.parametrize(
    ("row", "unit", "seconds"),
    [
        ({"hash_ids": [1], "input_length": 9, "timestamp": 3}, None, 0.003),
        ({"hash_ids": [1], "input_length": 9, "timestamp": 3, "chat_id": 7}, None, 3),
        ({"hash_ids": [1], "input_length": 9, "timestamp": 3}, 1.0, 3),
        ({"prompt": [1], "arrival": 3}, None, 3),
        ({"prompt": [1], "arrival": 3}, 1e-3, 0.003),
        ({"prompt": [1], "timestamp": 3, "arrival": None}, None, 0.003),
        ({"custom_id": "a", "body": {"prompt": [1]}, "timestamp": 3}, None, 0.003),
        ({"conversations": [{"value": "a"}, {"value": "b"}], "timestamp": 3}, 1.0, 3),
        ({"hash_ids": [1], "input_length": 9}, None, None),
    ],
)
def test_what_times_mean(row, unit, seconds):
    line = orjson.dumps({"output_length": 4} | row)
    if "body" in row:
        line = line.replace(b'"prompt"', b'"max_tokens":4,"prompt"')
    assert trace_lines.parse(line, Options(time_unit=unit)).arrival == seconds


def test_chats():
    system = {"role": "system", "content": "s" * 249}  # with its role 257 characters
    user = {"role": "user", "content": [{"type": "text", "text": "u" * 25}]}  # 31
    answer = {"role": "assistant", "content": "a" * 9}
    other = {"role": "user", "content": "v" * 25}
    limited = [system, user], {"max_tokens": 50, "max_completion_tokens": 7, "n": 2}
    found = read(
        chat(system, user, answer),
        chat(system, other, max_tokens=6),
        orjson.dumps({"custom_id": "r", "body": {"messages": limited[0], **limited[1]}}),
    )
    assert found.trace.prompt.tolist() == [72] * 4 and found.trace.output.tolist() == [3, 6, 7, 7]
    assert shared(found.trace, 0, 1) == 2 and shared(found.trace, 0, 2) == 3
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}  # 14 characters
    tools = [{"name": "t" * 115}]  # 128 characters: a block
    with_tools = [chat(message, call, tools=tools) for message in (user, other)]
    trace = read(*with_tools).trace
    assert trace.prompt.tolist() == [40, 40] and trace.output.tolist() == [4, 4]
    assert shared(trace, 0, 1) == 1


def test_share_gpt_is_read_as_benchmarks_do():
    turns = [
        {"from": who, "value": text}
        for who, text in (("human", "a" * 130), ("gpt", "b" * 9), ("human", "c" * 99))
    ]
    entries = [{"id": "x", "conversations": turns}, {"id": "y", "conversations": turns[:1]}]
    listed = read(*orjson.dumps(entries, option=orjson.OPT_INDENT_2).split(b"\n"))
    lined = read(*map(orjson.dumps, entries))
    for found in (listed, lined):
        assert found.trace.prompt.tolist() == [33] and found.trace.output.tolist() == [3]
        assert found.bad == 1 and found.problems[0][0] == 2
    with pytest.raises(ValueError, match="begins as a JSON list, but is none: "):
        read(b"[", *map(orjson.dumps, entries))


def test_vllm_s_custom_data():
    trace = read(b'{"prompt": "aaaa bbbb", "output_tokens": 17}').trace
    assert trace.prompt.tolist() == [3] and trace.output.tolist() == [17]


LOG = [
    b"[2026-11-22 10:00:09] server_args=ServerArgs(model_path='a')",
    b"[2026-11-22 10:00:09 TP0] Decode batch. #running-req: 2",
    logged(ids="[" + ", ".join(map(str, range(10_000))) + "]", tokens=10_000),  # 48 KB
    logged_json({"input_ids": list(range(40)), "text": None}, tokens=40),
]


@pytest.mark.parametrize(
    "collected",
    [
        lambda line: [b"sglang-1  | " + line],
        lambda line: [b"[pod/sglang-0/server] " + line],
        lambda line: [b"Nov 22 10:00:10 host python3[4711]: " + line],
        lambda line: [b"2026-11-22T10:00:10.123Z " + line],
    ],
)
def test_a_log_that_was_collected(collected):
    plain = read(*LOG).trace
    assert plain.prompt.tolist() == [10_000, 40] and shared(plain, 0, 1) == 1
    found = read(*(piece for line in LOG for piece in collected(line)))
    assert found.bad == 0 and found.notes == ()
    assert names_of(found.trace, 0) == names_of(plain, 0)
    assert names_of(found.trace, 1) == names_of(plain, 1)
    assert found.trace.arrival.tolist() == plain.arrival.tolist()


def test_a_log_without_requests_names_the_flag():
    with pytest.raises(ValueError, match="no request has finished.*--log-requests --log-requests-"):
        read(*LOG[:2])


def compressed(file, data):
    file.write_bytes(data)
    with file.open("rb") as opened:
        return read(*(line.rstrip(b"\n") for line in decompressed(opened)))


def test_a_byte_order_mark_is_no_damage():
    lines = [*hashed(64, (128, 2), (192, 3))]
    found = read(b"\xef\xbb\xbf" + lines[0], *lines[1:])
    assert found.bad == 0 and found.trace.size == 2


def test_gzip_is_read_and_its_damage_is_named(tmp_path):
    data = b"\n".join(hashed(64, *[(64 * i, 2) for i in range(3, 90)]))
    packed = gzip.compress(data)
    for content in (data, packed):
        found = compressed(tmp_path / "any name", content)
        assert found.trace.size == 87 and found.trace.block_tokens == 64
    for damaged in (packed[:-20], packed[:100] + b"\0" * 50 + packed[150:]):
        with pytest.raises(ValueError, match="its compression is damaged: "):
            compressed(tmp_path / "damaged", damaged)
