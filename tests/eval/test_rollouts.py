"""The rollouts of eval/examples, on a stand-in of SGLang's engine in which faults are planted."""

import math
import random
from types import SimpleNamespace

import pytest
import torch

from eval.examples import rollouts

PROMPTS = rollouts.prompts_of(7, 5)  # two of them strangers
ARGS = ["--model", "m", "--prompts", "5", "--samples", "3", "--prompt-tokens", "4"]


class Engine:
    """Answers each request by its prompt and seed alone, but for what `change(steps, requests)`
    makes of its (log-probability, token, text), given how many requests are sent at once."""

    def __init__(self, change=lambda steps, requests: steps):
        self.change, self.cached, self.sent, self.seeds = change, set(), [], set()
        self.is_busy = self.is_up = True

    def flush_cache(self):
        was_busy, self.is_busy = self.is_busy, False
        self.cached.clear()
        return SimpleNamespace(success=not was_busy)

    def generate(self, input_ids, sampling_params, return_logprob=False):
        if not return_logprob:
            assert sampling_params == {"max_new_tokens": 0}
            self.cached |= set(map(tuple, input_ids))
            return []
        self.sent.append({ids[0] for ids in input_ids})
        return [
            self._answer(ids, params, len(input_ids))
            for ids, params in zip(input_ids, sampling_params, strict=True)
        ]

    def _answer(self, ids, params, requests):
        assert params["temperature"] == 1.0
        self.seeds.add((ids[0], params["sampling_seed"]))
        rng = random.Random(f"{ids} {params['sampling_seed']}")
        count = params["max_new_tokens"]
        steps = [(-rng.expovariate(1), rng.randrange(1000), None) for _ in range(count)]
        cached = len(ids) - 1 if tuple(ids) in self.cached else 0
        steps = self.change(steps, requests)
        return {"meta_info": {"output_token_logprobs": steps, "cached_tokens": cached}}

    def shutdown(self):
        self.is_up = False


def compared(engine):
    return rollouts.compare(engine, PROMPTS, strangers=2, samples=4, new_tokens=9)


def test_equal_bits_are_told_and_pass(capsys):
    assert compared(Engine()) == 0
    said = capsys.readouterr().out
    tokens = 4 * sum(9 * (1 + i % 4) // 4 for i in range(5))
    assert said == (
        f"20 rollouts of 5 prompts (20 different ones, {tokens} tokens), again beside others: "
        "0 have other tokens or log-probabilities\n"
    )


def last_bit(steps):
    logprob, token, text = steps[-1]
    return [*steps[:-1], (math.nextafter(logprob, 0), token, text)]


def another_token(steps):
    logprob, token, text = steps[0]
    return [(logprob, token + 1, text), *steps[1:]]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (last_bit, "prompt 1, rollout 0, token 3: "),
        (another_token, "prompt 1, rollout 0, token 0: "),
        (lambda steps: [*steps, (-1.5, 7, None)], "prompt 1, rollout 0, token 4: (-1.5, 7), None"),
    ],
)
def test_a_planted_difference_is_found(fault, said, capsys):
    """In one rollout of twenty, where many are sent at once."""

    def change(steps, requests):
        fails = requests == 20 and len(steps) == 4 and not broken
        if fails:
            broken.append(steps)
        return fault(steps) if fails else steps

    broken: list = []
    assert compared(Engine(change)) == 1
    out = capsys.readouterr().out
    assert ": 1 have other tokens" in out and f"\n  {said}" in out


def test_a_prompt_that_was_cached_once_only_is_named(capsys):
    class Forgets(set):
        def __ior__(self, prompts):
            return self if len(prompts) == 5 else super().__ior__(prompts)

    engine = Engine(lambda steps, requests: last_bit(steps) if requests == 20 else steps)
    engine.cached = Forgets()
    assert compared(engine) == 1
    assert "; cached of its prompt: 0, 4" in capsys.readouterr().out


def test_zeros_of_either_sign_are_other_bits_and_nan_is_never_right():
    zero, minus, nan = ({(0, 0): rollouts.Rollout(((x, 5),), 0)} for x in (0.0, -0.0, math.nan))
    assert rollouts.differences(zero, zero) == []
    assert rollouts.differences(zero, minus) == [
        "prompt 0, rollout 0, token 0: (0.0, 5), (-0.0, 5)"
    ]
    assert len(rollouts.differences(nan, nan)) == 1


def test_every_prompt_is_sampled_with_seeds_of_its_own_in_two_companies():
    engine = Engine()
    compared(engine)
    firsts = [prompt[0] for prompt in PROMPTS]
    assert len(set(firsts)) == 7 and len(engine.seeds) == 7 * 4
    everyone, *apart = engine.sent
    assert everyone == set(firsts[:5])
    assert sorted(first for sent in apart for first in sent if first in everyone) == sorted(
        everyone
    )
    for sent in apart:
        assert len(sent & set(firsts[5:])) == 1 and 2 <= len(sent) < 5


# --- the command ----------------------------------------------------------------------------------
@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def test_without_a_gpu_one_sentence_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(rollouts, "engine_of", lambda *args: pytest.fail("it must not start"))
    assert rollouts.main(ARGS) == 2
    said = capsys.readouterr().err
    assert said.startswith("eval.examples.rollouts: needs a GPU") and said.count("\n") == 1


def test_a_server_that_is_refused_says_why(on_gpu, monkeypatch, capsys):
    def refused(model, backend):
        raise ValueError(f"cannot be served with {backend}")

    monkeypatch.setattr(rollouts, "engine_of", refused)
    assert rollouts.main(ARGS) == 2
    assert capsys.readouterr().err == "eval.examples.rollouts: cannot be served with prefix\n"


@pytest.mark.parametrize("wrong", [False, True])
def test_the_exit_status_is_that_of_the_comparison(wrong, on_gpu, monkeypatch):
    change = (
        (lambda steps, requests: last_bit(steps) if requests == 15 else steps) if wrong else None
    )
    engine = Engine(change) if change else Engine()
    monkeypatch.setattr(rollouts, "engine_of", lambda *args: engine)
    assert rollouts.main(ARGS) == wrong and not engine.is_up


@pytest.mark.parametrize("argument", ["--prompts=0", "--samples=x"])
def test_numbers_are_checked(argument, capsys):
    with pytest.raises(SystemExit):
        rollouts.main(["--model", "m", argument])
    assert argument[2:9] in capsys.readouterr().err
