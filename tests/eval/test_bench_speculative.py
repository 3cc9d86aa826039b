"""eval.bench_speculative with engines that answer at once, and its counts of verify batches."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from eval import provenance, report
from eval.bench_speculative import __main__ as bench
from eval.bench_speculative import verify_steps
from eval.counters import prefix_share
from eval.engine_process import uses_prefix
from sgl_prefix_attn.records import PREFIX, STOCK, Decision
from sgl_prefix_attn.step.extend import ExtendPreparer
from sgl_prefix_attn.step.preparer import Step
from tests.eval.fake_engines import fake_engines

ARGS = ["--device", "cpu", "--model-shape", "tiny", "--workload", "3x50+7"]
ARGS += ["--backends", "flashinfer,prefix/prefix", "--alternations", "2"]
SECONDS = {
    "flashinfer": 0.024,
    "prefix/prefix": 0.018,
    "fa3": 0.02,
    "fa3/prefix": 0.01,
}  # a step of the engine
STEPS = {"prefix:predicted_faster": 6, "stock:graph_batch_size": 2}


@pytest.fixture
def engines(monkeypatch):
    """Engines in which a step takes SECONDS and accepts `accepted` tokens; what they were given."""
    made = SimpleNamespace(accepted=3.0)

    def ask(backend, op, ids, new_tokens):
        (own,) = (one for one in made.started if one.backend == backend)
        assert (own.plugin == "eval.bench_speculative.verify_steps") == uses_prefix(backend)
        if own.plugin:
            own.home.mkdir(exist_ok=True)
            counts = {"4": STEPS, "1": {"stock:x": 9}}
            (own.home / "verify.json").write_text(json.dumps(counts))
            assert own.env[verify_steps.ENV] == str(own.home / "verify.json")
        seconds = 0.5 + SECONDS[backend] * new_tokens / made.accepted
        return {"seconds": seconds, "accepted": made.accepted}

    made.started = fake_engines(monkeypatch, ask)
    return made


def without_backends(arguments):
    return {key: value for key, value in arguments.items() if not key.endswith("attention_backend")}


def test_rows_hold_tpot_ratio_acceptance_and_the_share_over_plans(engines, tmp_path, capsys):
    out = tmp_path / "out.json"
    assert bench.main([*ARGS, "--json", str(out)]) == 0
    stock, prefix = provenance.load(out)["rows"]
    assert (stock["backend"], prefix["backend"]) == ("flashinfer", "prefix/prefix")
    assert (stock["ratio"], prefix["ratio"]) == (1.0, pytest.approx(0.75))
    assert (stock["tpot_ms"], prefix["tpot_ms"]) == (pytest.approx(8.0), pytest.approx(6.0))
    assert stock["accepted"] == prefix["accepted"] == 3.0 and stock["draft_tokens"] == 4
    assert (stock["verify_steps"], stock["prefix_share"]) == ({}, None)
    assert (prefix["verify_steps"], prefix["prefix_share"]) == (STEPS, 0.75)
    printed = capsys.readouterr().out
    assert "ratio 0.750  accepted 3.00  over plans 75.0%" in printed
    assert report.main([str(out)]) == 0
    assert "| 3x50+7 | prefix/prefix | 6.00 | 0.750 |" in capsys.readouterr().out


def test_all_engines_draft_alike(engines):
    assert bench.main([*ARGS, "--speculative", "5:3"]) == 0
    stock, prefix = (without_backends(one.arguments) for one in engines.started)
    assert stock == prefix
    assert all(one.env["SGLANG_SIMULATE_ACC_LEN"] == "3" for one in engines.started)
    chosen = {key: value for key, value in stock.items() if key.startswith("speculative")}
    assert chosen.pop("speculative_draft_model_path") != stock["model_path"]
    assert chosen == {
        "speculative_algorithm": "EAGLE",
        "speculative_num_steps": 4,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 5,
    }


def test_prefix_verifies_behind_another_prefill_backend(engines):
    assert bench.main([*ARGS, "--backends", "fa3,fa3/prefix"]) == 0
    stock, prefix = (without_backends(one.arguments) for one in engines.started)
    assert prefix == stock | {"speculative_attention_mode": "decode"}


def test_the_draft_has_one_layer_of_the_targets_shape(tmp_path):
    arguments = bench.draft_arguments(tmp_path / "draft", "llama3.1-8b", None, 4)
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle"]
    assert (config["num_hidden_layers"], config["num_key_value_heads"]) == (1, 8)
    assert arguments["speculative_algorithm"] == "EAGLE"


def test_a_draft_model_is_of_the_shape_that_is_named(tmp_path):
    arguments = bench.draft_arguments(tmp_path / "draft", "llama3.1-8b", "llama3.2-1b", 4)
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_hidden_layers"], config["num_attention_heads"]) == (16, 32)
    assert arguments["speculative_algorithm"] == "STANDALONE"


def test_an_acceptance_that_was_not_forced_is_an_error(engines, tmp_path, capsys):
    engines.accepted = 1.3
    assert bench.main([*ARGS, "--json", str(tmp_path / "out.json")]) == 1
    assert "flashinfer accepts 1.3 tokens, not 3" in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    "bad",
    [
        ["--speculative", "4"], ["--speculative", "4:5"], ["--speculative", "1:1"],
        ["--speculative", "4:0"], ["--new-tokens", "64,32"], ["--workload", "nope"],
        ["--workload", "small,one"],
    ],
)  # fmt: skip
def test_bad_arguments_end_with_usage(bad, capsys):
    with pytest.raises(SystemExit):
        bench.main([*ARGS, *bad])
    assert f"argument {bad[0]}:" in capsys.readouterr().err


def test_batches_are_counted_by_tokens_and_decision(monkeypatch, tmp_path):
    target = tmp_path / "verify.json"
    monkeypatch.setenv(verify_steps.ENV, str(target))
    answers = [Decision(PREFIX, "forced")] * 6 + [Decision(STOCK, "unshared")] * 3
    monkeypatch.setattr(ExtendPreparer, "prepare", lambda *_: Step(answers.pop(0)))
    monkeypatch.setattr(ExtendPreparer, "pass_over", ExtendPreparer.pass_over)
    verify_steps.register()
    preparer = object.__new__(ExtendPreparer)
    assert verify_steps.read(target, 4) == {}
    for lens in ([4, 4], [4, 4], [4, 1], [1, 1], *[[4, 4]] * 5):
        preparer.prepare(None, np.array(lens, np.int32), None)
    assert verify_steps.read(target, 4) == {}, "not written yet"
    answers.append(Decision(STOCK, "unshared"))
    preparer.prepare(None, np.array([4, 4, 4], np.int32))
    assert verify_steps.read(target, 4) == {"prefix:forced": 4, "stock:unshared": 4}
    assert prefix_share(verify_steps.read(target, 4)) == 0.5
    assert verify_steps.read(target, 1) == {"prefix:forced": 1}


def test_batches_that_are_passed_over_are_counted_with_the_last_one_verified(monkeypatch, tmp_path):
    target, stock = tmp_path / "verify.json", Decision(STOCK, "unshared")
    monkeypatch.setenv(verify_steps.ENV, str(target))
    monkeypatch.setattr(ExtendPreparer, "prepare", lambda *_: Step(stock))
    passed = [None, *[stock] * 6, None]
    monkeypatch.setattr(ExtendPreparer, "pass_over", lambda _: passed.pop(0))
    verify_steps.register()
    preparer = object.__new__(ExtendPreparer)
    for lens, verifies in (([4, 4], True), ([8, 8], False)):
        preparer.prepare(None, np.array(lens, np.int32), None, verifies)
    assert [preparer.pass_over() for _ in range(8)] == [None, *[stock] * 6, None]
    preparer.prepare(None, np.array([4, 4], np.int32), None, True)
    assert verify_steps.read(target, 4) == {"stock:unshared": 8}
