"""eval.workloads: loads are the same for a seed, and share what their names say."""

import json
from pathlib import Path

import numpy as np
import pytest

from eval.workloads import __main__ as command
from eval.workloads import grouped, traced
from eval.workloads.catalogue import NAMES, Choice, build
from eval.workloads.load import Load, Request, Scale, distinct_tokens, prompts, write, write_trace

SMALL = Choice(seed=3, longest=8192, scale=Scale(0.02, 0.1))
VOCABULARY = 1000
DRAWN = [name for name in NAMES if name != "mooncake"]
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{46 + i}.6805900,{100 + i},{40 + i}\n" for i in range(5)
)


def ids(load, seed=1):
    return list(prompts(load.requests, seed, VOCABULARY))


@pytest.mark.parametrize("name", DRAWN)
def test_a_load_is_the_same_for_a_seed(name):
    load = build(name, SMALL)
    assert load == build(name, SMALL) and ids(load) == ids(load)
    lengths = [request.input for request in load.requests]
    assert [len(prompt) for prompt in ids(load)] == lengths
    assert all(a != b for a, b in zip(ids(load), ids(load, seed=2), strict=True))
    assert all(request.output >= 1 for request in load.requests)


@pytest.mark.parametrize("name", DRAWN)
def test_what_prompts_share_is_what_their_parts_say(name):
    """Every prefix that two prompts have in common is one of a trie of the token ids themselves."""
    load = build(name, SMALL)
    trie: dict = {}
    nodes = 0
    for prompt in ids(load):
        at = trie
        for token in prompt:
            nodes += token not in at
            at = at.setdefault(token, {})
    # Two parts of different keys may begin with the same token by chance.
    assert nodes <= distinct_tokens(load.requests) <= nodes + 0.02 * nodes + 2
    assert load.facts()["shared_tokens"] == (
        sum(map(len, ids(load))) - distinct_tokens(load.requests)
    )


@pytest.mark.parametrize(
    ("name", "requests", "input_tokens", "distinct", "output_tokens"),
    [
        ("gsp", 512, 512 * 2176, 32 * 2048 + 512 * 128, 512 * 256),
        ("gsp64", 1024, 1024 * 2176, 64 * 2048 + 1024 * 128, 1024 * 256),
        ("grpo8", 128, 128 * 1024, 16 * 1024, 128 * 512),
        ("grpo64", 1024, 1024 * 1024, 16 * 1024, 1024 * 512),
        ("fewshot", 128, 128 * 6120, 6000 + 128 * 120, 128 * 64),
        ("unshared", 192, 192 * 2048, 192 * 2048, 192 * 256),
        ("selfconsistency", 256, 256 * 1320, 1200 + 16 * 120, 256 * 256),
        ("2x3:5+7:9", 6, 72, 2 * 5 + 6 * 7, 54),
    ],
)
def test_sizes(name, requests, input_tokens, distinct, output_tokens):
    facts = build(name, Choice(seed=1, longest=8192)).facts()
    assert facts["requests"] == requests and facts["input_tokens"] == input_tokens
    assert facts["input_tokens"] - facts["shared_tokens"] == distinct
    assert facts["output_tokens"] == output_tokens


def test_a_search_tree_has_its_levels():
    load = build("tree", Choice(seed=1, longest=8192))
    lengths = [request.input for request in load.requests]
    assert lengths == [1024] * 32 + [1152] * 128 + [1280] * 512
    paths = {request.parts for request in load.requests}
    assert len(paths) == 8 * (1 + 4 + 16)  # each state is expanded by four requests
    for path in paths:
        assert len(path) == 1 or path[:-1] in paths
    assert distinct_tokens(load.requests) == 8 * 1024 + 8 * (4 + 16) * 128


def test_agents_find_the_published_share_in_the_cache():
    load = build("agent", Choice(seed=1, longest=131072))
    facts = load.facts()
    assert facts["shared_tokens"] / facts["input_tokens"] == pytest.approx(0.59, abs=1e-3)
    tools = {request.parts[0] for request in load.requests}
    assert all(2560 <= tokens <= 6144 and tokens % 512 == 0 for _, tokens in tools)
    assert facts["output_tokens"] / facts["requests"] == pytest.approx(182, rel=0.01)
    few = build("agent", Choice(seed=1, longest=131072, scale=Scale(0.5, 1e-3))).requests
    assert len(few) == 1 and few[0].parts[0][1] == load.requests[0].parts[0][1] // 2


def test_conversations_have_three_levels_of_system_prompt():
    load = build("conversation", Choice(seed=1, longest=131072))
    assert all([t for _, t in r.parts[:3]] == [46, 348, 2123] for r in load.requests)
    levels = [{r.parts[: n + 1] for r in load.requests} for n in range(4)]
    assert [len(level) for level in levels] == [1, 4, 16, 384]
    arrivals = [request.at for request in load.requests]
    assert arrivals == sorted(arrivals) and arrivals[0] == 0
    assert arrivals[-1] / 383 == pytest.approx(1, rel=0.2)


def test_lengths_and_arrivals_of_the_azure_trace(tmp_path, monkeypatch):
    path = tmp_path / "conv.csv"
    path.write_text(AZURE)
    rows = traced.read_azure(path, 4)
    assert [row[1:] for row in rows] == [(100 + i, 40 + i) for i in range(4)]
    assert [row[0] for row in rows] == pytest.approx([0, 1, 2, 3])
    monkeypatch.setattr(traced, "_CONVERSATIONS", 4)
    load = build("conversation", Choice(seed=1, longest=8192, azure=path))
    assert [request.parts[-1][1] for request in load.requests] == [100, 101, 102, 103]
    assert [request.output for request in load.requests] == [40, 41, 42, 43]
    assert "conv.csv" in load.source
    with pytest.raises(ValueError, match=r"has 5 requests, 6 are needed"):
        traced.read_azure(path, 5)
    for bad in ("x,1,2", "2023-11-16 18:15:46,0,2", "2023-11-16 18:15:46,1"):
        path.write_text(AZURE + bad + "\n")
        with pytest.raises(ValueError, match=r"conv\.csv, line 7: expected TIMESTAMP"):
            traced.read_azure(path, 9)


def test_a_mooncake_trace_keeps_its_blocks(tmp_path, monkeypatch):
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 3000 * i, "input_length": 700, "output_length": 20, "hash_ids": [0, i + 1]}
        for i in range(4)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(traced, "_MOONCAKE", 3)
    load = traced.mooncake(path, 8192)
    assert [r.parts for r in load.requests] == [((0, 512), (i, 188)) for i in (1, 2, 3)]
    assert [request.at for request in load.requests] == pytest.approx([0, 1, 2])
    assert load == build("mooncake", Choice(1, 8192, mooncake=path))
    halved = build("mooncake", Choice(1, 8192, Scale(0.5), mooncake=path))
    assert halved.requests[0].parts == ((0, 256), (1, 94)) and halved.requests[0].output == 10


def test_a_file_says_what_is_sent_and_when(tmp_path):
    requests = tuple(Request(((0, 4), (i, 3)), 2 + i, at=1.5 * (i - 1)) for i in (1, 2))
    load = Load("some", requests, "here")
    path = tmp_path / "requests.jsonl"

    def lines(rate):
        write(load, path, seed=1, vocab_size=VOCABULARY, rate=rate)
        return [json.loads(line) for line in path.read_text().splitlines()]

    rows = lines(rate=2.0)
    assert [row["timestamp"] for row in rows] == [0, 750]
    words = [[int(w, 16) for w in row["conversations"][0]["content"].split()] for row in rows]
    assert words == ids(load) and words[0][:4] == words[1][:4] != words[0][3:]
    answers = [len(row["conversations"][1]["content"].split()) for row in rows]
    assert answers == [row["output_len"] for row in rows] == [3, 4]
    assert not any("timestamp" in row for row in lines(rate=np.inf))


def test_a_trace_has_token_ids_and_arrivals(tmp_path):
    load = grouped.load("some", grouped.Groups(2, 2, 5, 3, 4), seed=1)
    path = tmp_path / "trace.jsonl"
    for rate in (None, 2.0, 4.0):
        write_trace(load, path, seed=1, vocab_size=VOCABULARY, rate=rate)
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert [row["prompt"] for row in rows] == ids(load)
        assert {row["output_length"] for row in rows} == {4}
        arrivals = [row.get("arrival") for row in rows]
        if rate is None:
            assert arrivals == [None] * 4
        elif rate == 2.0:
            assert arrivals == sorted(arrivals) and arrivals[0] == 0 < arrivals[1]
            slow = arrivals
        else:
            assert arrivals == pytest.approx([at / 2 for at in slow])
    own = build("conversation", SMALL)
    write_trace(own, path, seed=1, vocab_size=VOCABULARY, rate=4.0)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["arrival"] for row in rows] == [request.at / 4 for request in own.requests]


def test_the_command_tells_and_writes(tmp_path, capsys):
    assert command.main(["2x3:50+7:9", "4x1:0+20:3", "--traces", str(tmp_path / "t")]) == 0
    text = capsys.readouterr().out
    assert "| 2x3:50+7:9 | 6 | 58% |" in text and "| 4x1:0+20:3 | 4 | 0% |" in text
    assert len((tmp_path / "t" / "2x3:50+7:9.jsonl").read_text().splitlines()) == 6
    with pytest.raises(SystemExit):
        command.main(["gps"])


def test_zipf_has_popular_groups():
    shape = grouped.NAMED["zipf"]
    load = grouped.load("zipf", shape, seed=1)
    groups = np.bincount([request.parts[0][0] for request in load.requests], minlength=32)
    assert groups.sum() == 512 and groups[0] > 4 * groups[16:].mean()
    assert "--gsp-zipf-alpha" in load.dataset


def test_flags_of_the_client_s_own_datasets():
    flags = dict.fromkeys(grouped.load("grpo8", grouped.NAMED["grpo8"], 1).dataset)
    assert "--gsp-ordered" in flags and "generated-shared-prefix" in flags
    assert build("tree", SMALL).dataset == ()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gps", "'gps': known are gsp"),
        ("0x3:1+1:1", "known are"),
        ("1x3:0+0:1", "known are"),
        ("1x3:1+1:0", "known are"),
        ("mooncake", "--mooncake-trace"),
        ("1x1:8000+100:100", "8200 tokens; at most 8192"),
    ],
)
def test_a_load_that_cannot_be_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        build(name, Choice(seed=1, longest=8192))


def test_a_trace_that_is_missing_is_named():
    with pytest.raises(OSError, match="nowhere"):
        build("conversation", Choice(seed=1, longest=8192, azure=Path("nowhere.csv")))
