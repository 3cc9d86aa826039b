"""Log-probabilities of a running engine along given tokens.

An SGLang plugin of the evaluation, loaded into the engine's processes by eval.engine_process; it
plants a fault as well when one is asked for (faults.py). Two correct backends soon choose
different tokens where bf16 makes two nearly equal, and compute different things from then on. So
one engine's tokens are the others' teacher: whatever those would choose, they go on with the
teacher's, and every step of every request has the same context in all engines.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from eval.compare_outputs import faults
from eval.compare_outputs.dump import prefix_step

# Files. Where the teacher has no token, the engine goes on with its own, a greedy one.
RECORD_ENV, TEACHER_ENV = "EVAL_LOGPROBS", "EVAL_TEACHER"


@dataclass(frozen=True)
class Sampled:
    """One token of one request.

    request   its id
    context   tokens before this one
    decode    whether a decode step made it, not prefill
    token     what the request went on with; greedy: what the engine would have chosen
    logprob   log-probability of `token`
    top       the two best tokens as (token, log-probability)
    variant   of a `prefix` backend's step, None with any other backend
    """

    request: str
    context: int
    decode: bool
    token: int
    greedy: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    variant: str | None


def read(record: Path) -> list[Sampled]:
    return [
        Sampled(**row | {"top": tuple(map(tuple, row["top"]))})
        for row in map(json.loads, record.read_text().splitlines())
    ]


def fixed(request: str, prompt: int, tokens: Sequence[int]) -> list[Sampled]:
    """Make a teacher's steps of a request that goes on with given tokens after its prompt."""
    return [
        Sampled(request, prompt + i, decode=i > 0, token=token, greedy=token, logprob=0.0, top=(),
                variant=None)
        for i, token in enumerate(tokens)
    ]  # fmt: skip


def write(record: Path, steps: Iterable[Sampled]) -> None:
    """Append steps to a record, which is made if need be."""
    with record.open("a") as out:
        out.writelines(json.dumps(asdict(step)) + "\n" for step in steps)


def register() -> None:
    faults.register()
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    recorder = Recorder(Path(os.environ[RECORD_ENV]), read(Path(os.environ[TEACHER_ENV])))
    target = "sglang.srt.model_executor.model_runner.ModelRunner.sample"
    HookRegistry.register(target, recorder.around_sample, HookType.AROUND)


class Recorder:
    """State of the plugin in one engine process."""

    def __init__(self, record: Path, teacher: list[Sampled]):
        self._record = record
        self._teacher = {(step.request, step.context): step.token for step in teacher}

    def around_sample(self, original, runner, logits_output, forward_batch):
        # Before the sampler, which may change them in place.
        logprobs = torch.log_softmax(logits_output.next_token_logits.float(), dim=-1)
        greedy = original(runner, logits_output, forward_batch)
        chosen = greedy.tolist()
        places = list(zip(forward_batch.rids, forward_batch.seq_lens.tolist(), strict=True))
        given = [self._teacher.get(place, own) for place, own in zip(places, chosen, strict=True)]
        tokens = torch.tensor(given, dtype=greedy.dtype, device=greedy.device)
        values = logprobs.gather(1, tokens.long()[:, None])[:, 0].tolist()
        best = zip(*(part.tolist() for part in reversed(logprobs.topk(2))), strict=True)
        step = prefix_step(runner)
        variant = None if step is None else step.decision.variant
        decode = forward_batch.forward_mode.is_decode()
        steps = [
            Sampled(
                request=request, context=context, decode=decode, token=token, greedy=own,
                logprob=value, top=tuple(zip(*two, strict=True)), variant=variant,
            )
            for (request, context), own, token, value, two in zip(
                places, chosen, given, values, best, strict=True
            )
        ]  # fmt: skip
        write(self._record, steps)
        return tokens
