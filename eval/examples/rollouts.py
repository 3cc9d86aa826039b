"""GRPO-like rollouts, sampled twice beside other requests: the same tokens and log-probabilities,
bit for bit.

    python -m eval.examples.rollouts --model Qwen/Qwen3-8B
    python -m eval.examples.rollouts --model Qwen/Qwen3-8B --backend fa3     # SGLang's own kernels

It needs a GPU on which the backend serves `--enable-deterministic-inference`. Exit status: 0 where
all bits are the same, 1 where some differ, 2 where it cannot run.

Worth copying, besides the engine's arguments:

- Each rollout is a request with a seed of its own. `n=16` is no group of rollouts in this mode:
  what SGLang draws follows from seed and position, so all sixteen would be the same.
- A prompt is read before its rollouts, which go on from the cache: SGLang's prefill may give a
  prompt other bits where part of it is cached, or where it is read in chunks. For the same reason
  these prompts begin with different tokens, and chunks are turned off.
"""

from __future__ import annotations

import argparse
import math
import random
import struct
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest

from sgl_prefix_attn.tools.argument_types import count

IDS = range(1000, 10_000)  # of prompts' tokens: most vocabularies have them
TOLD = 5  # differences that are printed


@dataclass(frozen=True)
class Rollout:
    """What was generated, and how many tokens of the prompt were cached.

    steps  (log-probability, token) of each
    """

    steps: tuple[tuple[float, int], ...]
    cached: int


Rollouts = dict[tuple[int, int], Rollout]  # by prompt and sample


def prompts_of(number: int, tokens: int, ids: range = IDS, seed: int = 0) -> list[list[int]]:
    """Make up prompts, no two of which begin with the same token."""
    rng = random.Random(f"rollouts {seed}")
    firsts = rng.sample(ids, number)
    return [[first, *rng.choices(ids, k=tokens - 1)] for first in firsts]


def companies(number: int, strangers: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return two ways to send so many prompts: all at once; and in another order, a few at a time,
    each time beside one of the strangers, which are numbered behind them."""
    order = random.Random("company").sample(range(number), number)
    few = max(1, number // strangers)
    return [list(range(number))], [
        [number + i % strangers, *order[at : at + few]]
        for i, at in enumerate(range(0, number, few))
    ]


def sample(
    engine, prompts: list[list[int]], sent: Iterable[list[int]], samples: int, new_tokens: int
) -> Rollouts:
    """Sample each prompt `samples` times, those of a list of `sent` at once, from an empty cache.

    Rollouts of different prompts have up to a quarter, half ... of new_tokens, so that they leave
    the batch at different times.
    """
    _flush(engine)
    found = {}
    for batch in sent:
        engine.generate(
            input_ids=[prompts[i] for i in batch], sampling_params={"max_new_tokens": 0}
        )
        keys = [(i, number) for i in batch for number in range(samples)]
        answers = engine.generate(
            input_ids=[prompts[i] for i, _ in keys],
            sampling_params=[
                {
                    "temperature": 1.0,
                    "sampling_seed": 1000 * i + number,
                    "max_new_tokens": max(1, new_tokens * (1 + i % 4) // 4),
                }
                for i, number in keys
            ],
            return_logprob=True,
        )
        for key, answer in zip(keys, answers, strict=True):
            info = answer["meta_info"]
            steps = ((logprob, token) for logprob, token, *_ in info["output_token_logprobs"])
            found[key] = Rollout(tuple(steps), info["cached_tokens"])
    return found


def _flush(engine) -> None:
    """Empty the radix cache, which only an idle engine does."""
    for _ in range(100):
        if engine.flush_cache().success:
            return
        time.sleep(0.1)
    raise RuntimeError("the engine did not become idle")


def differences(one: Rollouts, other: Rollouts) -> list[str]:
    """Say of each rollout of `one` that has other tokens or bits in `other`, or NaN, where that
    begins."""
    found = []
    for (prompt, number), mine in one.items():
        its = other[prompt, number]
        pairs = enumerate(zip_longest(mine.steps, its.steps))
        if first := next(((at, pair) for at, pair in pairs if not _are_equal(*pair)), None):
            at, (step, another) = first
            cached = f"; cached of its prompt: {mine.cached}, {its.cached}"
            found.append(
                f"prompt {prompt}, rollout {number}, token {at}: {step}, {another}"
                + (cached if mine.cached != its.cached else "")
            )
    return found


def _are_equal(step: tuple[float, int] | None, other: tuple[float, int] | None) -> bool:
    if step is None or other is None or math.isnan(step[0]):
        return False
    return struct.pack("<dq", *step) == struct.pack("<dq", *other)


def compare(engine, prompts: list[list[int]], strangers: int, samples: int, new_tokens: int) -> int:
    """Sample the prompts in two companies, the last of them being strangers, which are not
    compared; print what was found and return the exit status."""
    number = len(prompts) - strangers
    one, other = (
        sample(engine, prompts, sent, samples, new_tokens) for sent in companies(number, strangers)
    )
    found = differences(one, other)
    texts = [tuple(token for _, token in rollout.steps) for rollout in one.values()]
    print(
        f"{len(one)} rollouts of {number} prompts ({len(set(texts))} different ones, "
        f"{sum(map(len, texts))} tokens), again beside others: {len(found)} have other tokens or "
        "log-probabilities"
    )
    for line in found[:TOLD]:
        print(f"  {line}")
    return 1 if found else 0


def engine_of(model: str, backend: str):
    """Start an engine of deterministic inference. Raises ValueError where that is refused."""
    import sglang

    return sglang.Engine(
        model_path=model, decode_attention_backend=backend, enable_deterministic_inference=True,
        chunked_prefill_size=-1, log_level="warning",
    )  # fmt: skip


def main(argv: list[str]) -> int:
    args = _parse(argv)
    import torch

    if not torch.cuda.is_available():
        return _refuse("needs a GPU: SGLang's deterministic inference has no products for a CPU")
    try:
        engine = engine_of(args.model, args.backend)
    except ValueError as error:
        return _refuse(str(error))
    try:
        strangers = max(1, args.prompts // 4)
        prompts = prompts_of(args.prompts + strangers, args.prompt_tokens)
        return compare(engine, prompts, strangers, args.samples, args.new_tokens)
    finally:
        engine.shutdown()


def _refuse(reason: str) -> int:
    print(f"eval.examples.rollouts: {reason}", file=sys.stderr)
    return 2


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m eval.examples.rollouts", description=__doc__.partition("\n\n")[0]
    )
    parser.add_argument("--model", required=True, help="a path, or a name on the Hugging Face hub")
    parser.add_argument("--backend", default="prefix", help="of decode steps")
    for name, default, what in (
        ("prompts", 16, "that are compared"), ("samples", 16, "of each prompt"),
        ("prompt-tokens", 1024, "of each prompt"), ("new-tokens", 256, "of a rollout, at most"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=count, default=default, help=f"{what} ({default})")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
