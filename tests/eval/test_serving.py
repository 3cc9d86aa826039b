"""eval.bench_serving with SGLang's own client, and on real servers on the CPU."""

import asyncio
import json
import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import AutoTokenizer

from eval import provenance
from eval.bench_serving.client import client_environment
from eval.model_shapes import SHAPES
from eval.word_tokenizer import write_word_model
from eval.workloads import grouped
from eval.workloads.load import Load, Request, prompts, write
from tests.support.evaluation_process import run_evaluation

VOCABULARY = SHAPES["tiny"]["vocab_size"]


@pytest.fixture
def tokenizer(tmp_path, monkeypatch):
    """The servers' tokenizer, on a path with which SGLang's client can be imported."""
    env = client_environment(tmp_path / "home")
    monkeypatch.setenv("HOME", env["HOME"])
    monkeypatch.syspath_prepend(tmp_path / "home" / "site")
    return AutoTokenizer.from_pretrained(write_word_model(tmp_path / "model", "tiny"))


def shared_starts(rows: list[list[int]], tokens: int) -> list[int]:
    """How many rows begin alike, by their first tokens; sorted."""
    return sorted(Counter(tuple(row[:tokens]) for row in rows).values())


@pytest.mark.parametrize(
    "shape",
    [
        grouped.Groups(4, 6, 30, 5, 7),
        grouped.Groups(4, 6, 30, 5, 7, zipf=1.0),
        grouped.Groups(3, 5, 20, 0, 2, ordered=True),
        grouped.Groups(9, 1, 0, 40, 6),
    ],
)
def test_a_load_of_groups_is_what_sglang_s_client_sends(tokenizer, shape):
    from sglang.benchmark.datasets.generated_shared_prefix import GeneratedSharedPrefixDataset

    load = grouped.load("some", shape, seed=1)
    random.seed(1)
    np.random.seed(1)
    dataset = GeneratedSharedPrefixDataset.from_args(
        SimpleNamespace(
            gsp_num_groups=shape.groups,
            gsp_prompts_per_group=shape.prompts,
            gsp_system_prompt_len=shape.shared,
            gsp_question_len=shape.private,
            gsp_output_len=shape.output,
            gsp_ordered=shape.ordered,
            gsp_group_distribution="uniform" if shape.zipf is None else "zipf",
            gsp_zipf_alpha=shape.zipf,
            seed=1,
        )
    )
    rows = dataset.load(tokenizer)
    sent = [tokenizer.encode(row.prompt) for row in rows]
    assert [len(ids) for ids in sent] == [row.prompt_len for row in rows]
    assert {len(ids) for ids in sent} == {shape.shared + shape.private}
    assert {row.output_len for row in rows} == {shape.output}
    ours = list(prompts(load.requests, 1, VOCABULARY))
    for tokens in (shape.shared or 8, shape.shared + shape.private):
        assert shared_starts(sent, tokens) == shared_starts(ours, tokens)
    if shape.ordered:
        assert all(sent[i] == sent[i - i % shape.prompts] for i in range(len(sent)))


@pytest.mark.slow
@pytest.mark.parametrize("rate", [np.inf, 1000.0])
def test_a_request_file_is_sent_in_order_at_its_times(tokenizer, tmp_path, monkeypatch, rate):
    from sglang.benchmark import serving

    from eval.bench_serving.request_client import RequestFile

    monkeypatch.setattr(serving, "get_request", serving.get_request)  # undone at the end
    # The last one arrives first: who goes by arrivals turns their order around.
    requests = [Request(((0, 9), (i, 3)), 2 + i, at=float(3 - i)) for i in (1, 2, 3)]
    path = tmp_path / "requests.jsonl"
    load = Load("some", tuple(requests), "here")
    write(load, path, seed=1, vocab_size=VOCABULARY, rate=rate)
    rows = RequestFile.from_args(SimpleNamespace(dataset_path=str(path))).load()
    assert [tokenizer.encode(row.prompt) for row in rows] == list(prompts(requests, 1, VOCABULARY))
    assert {row.prompt_len for row in rows} == {12}

    async def sent() -> list[int]:
        return [row.output_len async for row in serving.get_request(rows, float("inf"))]

    assert asyncio.run(sent()) == ([3, 4, 5] if rate == np.inf else [5, 4, 3])


@pytest.mark.engine
@pytest.mark.long
def test_two_loads_on_a_server(tmp_path):
    out = tmp_path / "out.json"
    options = ["--device", "cpu", "--json", str(out)]
    options += ["--model-shape", "tiny", "--max-running", "4", "--backends", "prefix"]
    # So close together that four run at the same time, and the others find what those have left.
    options += ["--loads", "2x12:4000+100:400,conversation", "--rates", "400,offline"]
    options += ["--length-scale", "0.1", "--count-scale", "0.03"]
    ran = run_evaluation("bench_serving", *options)
    assert ran.returncode == 0, ran.stdout
    result = json.loads(out.read_text())
    rows = {row["load"]: row for row in result["rows"] if row["rate"] == "400"}
    assert (
        len(rows) == 2
        and len(result["rows"]) == 4
        and provenance.load(out)["meta"]["settings"]["device"] == "cpu"
    )
    for row in result["rows"]:
        load = result["meta"]["loads"][row["load"]]
        assert row["sent"] == row["completed"] == load["requests"] and row["error"] is None
        assert row["input_tokens"] == load["input_tokens"]
        assert row["output_tokens"] == load["output_tokens"]
        # No earlier load is found in the cache: not more than what the load itself shares.
        assert 0 <= row["cached_share"] <= load["shared_tokens"] / load["input_tokens"]
        assert 1 <= row["peak_running"] <= 4
        assert 0 < row["e2e_ms"]["p50"]
        assert row["attention"]["decode_attention_backend"] == "prefix" and row["steps"]
    assert all(0 < row["tpot_ms"]["p50"] <= row["e2e_ms"]["p99"] for row in rows.values())
    ours = rows["2x12:4000+100:400"]
    assert ours["prefix_share"] > 0 and ours["cached_share"] > 0
    assert 0 < ours["kv_bytes"]["read"] < ours["kv_bytes"]["query_centric"]
