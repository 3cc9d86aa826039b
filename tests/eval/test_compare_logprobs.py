"""eval.compare_outputs logprobs without an engine."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from eval import help_desk
from eval.checkpoints import CHECKPOINTS
from eval.compare_outputs import __main__ as compare_outputs
from eval.compare_outputs import subject, teacher
from eval.compare_outputs.logprobs import compare, differ, problem, turned_problem
from eval.compare_outputs.teacher import Recorder, Sampled
from eval.word_tokenizer import write_word_model


def sampled(request="shared/0", context=5, token=3, logprob=-1.0, **changes):
    top = ((token, logprob), (token + 1, logprob - 2.0))
    known = {"decode": True, "greedy": token, "top": top, "variant": None}
    return Sampled(request, context, token=token, logprob=logprob, **known | changes)


REFERENCE = [sampled(f"shared/{i}", 5 + step) for i in range(4) for step in range(10)]


def shifted(by, requests=4):
    """The reference's steps; the first requests' log-probabilities are higher."""
    return [
        replace(s, logprob=s.logprob + by) if int(s.request[-1]) < requests else s
        for s in REFERENCE
    ]


def test_the_error_of_log_probabilities():
    other = shifted(0.25, requests=1)
    other[-1] = replace(other[-1], greedy=9, logprob=-3.0)
    error = compare(REFERENCE, other)
    assert (error.tokens, error.max, error.worst_request) == (40, 2.0, 0.25)
    assert error.mean == pytest.approx((10 * 0.25 + 2.0) / 40)
    assert error.equal_greedy == pytest.approx(39 / 40)
    assert compare(REFERENCE, REFERENCE[7:]).tokens == 33, "steps that ran stock are left out"


def test_the_perplexity_of_both_engines():
    error = compare(REFERENCE, shifted(-0.5))
    assert error.perplexity == pytest.approx((math.exp(1.0), math.exp(1.5)))


def turned(gap, steps):
    """The reference's steps, the first of which would have chosen the second best token."""
    other = list(REFERENCE)
    for i in range(steps):
        best = ((4, -1.0), (3, -1.0 - gap))
        other[i] = replace(other[i], greedy=4, top=best)
    return other


def with_gap(gap):
    return [replace(s, top=((3, -1.0), (4, -1.0 - gap))) for s in REFERENCE]


def test_greedy_texts_part_at_near_ties_alone():
    tie = differ(with_gap(0.001), turned(0.001, 1))
    assert tie.max_gap == pytest.approx(0.001) and tie.equal_share == 0.75
    assert turned_problem(differ(REFERENCE, REFERENCE), []) is None
    # One of four texts parts at once, where rounding may turn the best two.
    last = [*REFERENCE[:-1], replace(REFERENCE[-1], greedy=4, top=((4, -1.0), (3, -1.001)))]
    assert turned_problem(differ(with_gap(0.001), last), []) is None
    wide = [*REFERENCE[:-1], replace(REFERENCE[-1], greedy=4, top=((4, -1.0), (3, -1.5)))]
    found = turned_problem(differ(REFERENCE, wide), [])
    assert "top-2 gap of 2.000" in found
    # As wide a gap turns between two stock engines.
    assert turned_problem(differ(REFERENCE, wide), [differ(REFERENCE, wide)]) is None


def test_a_text_is_cut_into_what_requests_begin_and_go_on_with():
    text = list(range(300))
    requests = subject.going_on(text, 50)
    assert [len(r["ids"]) for r in requests] == [64, 114, 164, 214]
    for request in requests:
        begun = len(request["ids"])
        assert request["ids"] + request["then"] == text[: begun + 50]
        steps = teacher.fixed("text/0", begun, request["then"])
        assert [step.context for step in steps] == list(range(begun, begun + 50))
        assert [step.token for step in steps] == request["then"]


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ([], "0 of 0"),
        ([*REFERENCE, sampled(context=99)], "1 of 41"),
        ([replace(REFERENCE[0], token=4)], "shared/0 went on with another token at 5"),
    ],
)
def test_other_tokens_are_no_comparison(other, says):
    with pytest.raises(ValueError, match=says):
        compare(REFERENCE, other)


@pytest.mark.parametrize(
    ("tested", "says"),
    [
        (shifted(0.039), None),
        (shifted(0.041), "mean error 0.0410, at most 0.0400"),
        (shifted(0.05, requests=1), "worst request error 0.0500, at most 0.0400"),
        (shifted(float("nan")), "mean error nan"),
    ],
)
def test_ours_may_be_twice_as_far_as_stock(tested, says):
    found = problem(compare(REFERENCE, tested), [compare(REFERENCE, shifted(0.02))])
    assert found is None if says is None else says in found
    alone = problem(compare(REFERENCE, tested), [])
    assert alone is not None, "without a yardstick float32's rounding is allowed"


def test_an_engine_goes_on_with_the_teacher_s_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(teacher, "prefix_step", lambda runner: None)
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 1.0]])

    def sample(record, lessons):
        batch = SimpleNamespace(
            rids=["shared/0", "warm-up"],
            seq_lens=torch.tensor([7, 7]),
            forward_mode=SimpleNamespace(is_decode=lambda: True),
        )
        output = SimpleNamespace(next_token_logits=logits.clone())

        def original(runner, output, batch):
            output.next_token_logits.zero_()  # as a sampler that works in place
            return logits.argmax(dim=1)

        teacher.write(record.with_suffix(".lesson"), lessons)
        lessons = teacher.read(record.with_suffix(".lesson"))
        tokens = Recorder(record, lessons).around_sample(original, None, output, batch)
        return tokens.tolist(), teacher.read(record)

    own, greedy = sample(tmp_path / "own", [])
    assert own == [1, 0]
    lesson = [sampled(context=6, token=0), sampled(context=7, token=2)]
    forced, steps = sample(tmp_path / "forced", lesson)
    assert forced == [2, 0] and [s.greedy for s in steps] == [1, 0]
    expected = torch.log_softmax(logits, dim=-1)
    assert steps[0].logprob == pytest.approx(expected[0, 2].item())
    assert greedy[0].logprob == pytest.approx(expected[0, 1].item())
    for step, best, second in ((steps[0], 1, 2), (steps[1], 0, 2)):
        assert [token for token, _ in step.top] == [best, second]
    assert [value for _, value in steps[1].top] == pytest.approx(expected[1, [0, 2]].tolist())


def test_a_trained_model_is_asked_chats_below_one_prompt(tmp_path, monkeypatch):
    model = write_word_model(tmp_path / "model", "tiny")
    monkeypatch.setattr(subject.checkpoints, "model", lambda checkpoint: model)
    asked = subject.trained(CHECKPOINTS["smollm2"], 64)
    assert asked.model == model and asked.layers == 2
    chats = [request["ids"] for request in asked.requests["chats"]]
    common = os.path.commonprefix(chats)
    assert len(common) >= len(help_desk.SYSTEM.split()) and len(chats) == 24
    assert asked.requests["text"] and all(len(r["then"]) == 64 for r in asked.requests["text"])


def test_a_model_that_does_not_chat_goes_on_with_texts_behind_its_first_token(
    tmp_path, monkeypatch
):
    model = write_word_model(tmp_path / "model", "tiny")
    settings = model / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"bos_token": "3f"}))
    monkeypatch.setattr(subject.checkpoints, "model", lambda checkpoint: model)
    asked = subject.trained(CHECKPOINTS["gemma3-270m"], 64)
    for requests in asked.requests.values():
        assert all(request["ids"][0] == 0x3F for request in requests)
        assert all(request["ids"].count(0x3F) == 1 for request in requests)
    common = os.path.commonprefix([request["ids"] for request in asked.requests["chats"]])
    assert len(common) >= len(help_desk.SYSTEM.split())


class Engine:
    """Stands in for EngineProcess: every request decodes three tokens; ours are off by `shift`."""

    start_s, shift = 1.0, 0.0

    def __init__(self, arguments, folder, *, plugin, env):
        self.record = Path(env[teacher.RECORD_ENV])
        self.has_teacher = bool(teacher.read(Path(env[teacher.TEACHER_ENV])))
        self.ours = arguments["attention_backend"] == "prefix"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def wait_until_up(self):
        pass

    def ask(self, op, requests):
        assert self.has_teacher == (self.record.parent.name != "torch_native")
        for request in requests:
            for step in range(5):  # the first by prefill, the last one step too many
                changes = {"decode": step > 0, "variant": "prefix" if self.ours else None}
                row = sampled(request["id"], len(request["ids"]) + step, **changes)
                row = replace(row, logprob=-1.0 + self.shift * self.ours)
                teacher.write(self.record, [row])


def test_engines_are_judged_along_the_first_one_s_tokens(tmp_path, monkeypatch, capsys):
    engines = compare_outputs.seeded_engine
    monkeypatch.setattr(engines, "EngineProcess", Engine)
    monkeypatch.setattr(engines, "write_model", lambda folder, *_: folder)
    out = tmp_path / "logprobs.json"
    argv = ["logprobs", "--device", "cpu", "--model-shape", "tiny", "--new-tokens", "4"]
    argv += ["--backends", "torch_native,triton,prefix", "--page-size", "1", "--json", str(out)]
    assert compare_outputs.main(argv) == 0
    rows = compare_outputs.provenance.load(out)["rows"]
    assert [(r["scenario"], r["backend"], r["tokens"]) for r in rows] == [
        (name, backend, 3 * count)
        for name, count in (("shared", 64), ("three_levels", 48))
        for backend in ("triton", "prefix")
    ]
    monkeypatch.setattr(Engine, "shift", 0.01)
    assert compare_outputs.main(argv) == 1
    assert "2 of 4 comparisons are wrong" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["logprobs", "--device=cpu", "--backends=prefix,triton"], "prefix is first"),
        (["logprobs", "--device=cpu", "--backends=triton"], "two or more"),
        (["logprobs", "--device=cpu", "--backends=fa3,fa3"], "names one twice"),
        (
            ["logprobs", "--device=cpu", "--backends=fa3,prefix", "--model=smollm2", "--scale=2"],
            "--scale: not with --model",
        ),
        (["logprobs", "--device=cpu", "--scal=2"], "unrecognized arguments: --scal=2"),
    ],
)
def test_bad_arguments_end_with_usage(argv, says, capsys):
    with pytest.raises(SystemExit) as stop:
        compare_outputs.main(argv)
    assert stop.value.code == 2 and says in capsys.readouterr().err.split("error:")[1]


def test_bf16_needs_a_yardstick(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SystemExit):
        compare_outputs.main(["logprobs", "--backends=flashinfer,prefix"])
    assert "two stock ones" in capsys.readouterr().err
