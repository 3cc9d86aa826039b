"""Groups of prompts with one shared part each, which SGLang's own client draws."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace

import numpy as np

from eval.workloads.load import Load, Request, Scale


@dataclass(frozen=True)
class Groups:
    """`groups` x `prompts` requests of `shared` + `private` prompt tokens, `output` generated.

    zipf     prompts choose their group by 1 / rank ** zipf instead of in equal shares
    ordered  a group's prompts arrive one after another; otherwise the client shuffles all
    """

    groups: int
    prompts: int
    shared: int
    private: int
    output: int
    zipf: float | None = None
    ordered: bool = False

    def scaled(self, scale: Scale) -> Groups:
        lengths = map(scale.tokens, (self.shared, self.private, self.output))
        changes = dict(zip(("shared", "private", "output"), lengths, strict=True))
        return replace(self, groups=scale.number(self.groups), **changes)


NAMED = {
    "gsp": Groups(32, 16, 2048, 128, 256),
    "gsp64": Groups(64, 16, 2048, 128, 256),  # the client's own defaults
    "zipf": Groups(32, 16, 2048, 128, 256, zipf=1.0),
    # A rollout step: n samples of each of 16 prompts, which have nothing of their own.
    **{f"grpo{n}": Groups(16, n, 1024, 0, 512, ordered=True) for n in (8, 16, 64)},
    "fewshot": Groups(1, 128, 6000, 120, 64),
    "unshared": Groups(192, 1, 0, 2048, 256),
}


def parse(text: str) -> Groups | None:
    """Parse GROUPSxPROMPTS:SHARED+PRIVATE:OUTPUT; None for anything else."""
    match = re.fullmatch(r"(\d+)x(\d+):(\d+)\+(\d+):(\d+)", text)
    if match is None:
        return None
    made = Groups(*map(int, match.groups()))
    fine = made.groups and made.prompts and made.output and made.shared + made.private
    return made if fine else None


def load(name: str, shape: Groups, seed: int) -> Load:
    """Make a load of groups; its prompts are those of the client in number, length and sharing."""
    requests = []
    for i, group in enumerate(_assignment(shape, seed).tolist()):
        parts = ((group, shape.shared), (shape.groups + i, shape.private))
        requests.append(Request(tuple(part for part in parts if part[1]), shape.output))
    if not shape.ordered:
        random.Random(seed).shuffle(requests)
    return Load(name, tuple(requests), "fixed lengths", _flags(shape))


def _assignment(shape: Groups, seed: int) -> np.ndarray:
    """Return the group of each prompt; with zipf drawn as the client does."""
    count = shape.groups * shape.prompts
    if shape.zipf is None:
        return np.repeat(np.arange(shape.groups), shape.prompts)
    weights = np.arange(1, shape.groups + 1) ** -shape.zipf
    return np.random.default_rng(seed).choice(shape.groups, size=count, p=weights / weights.sum())


def _flags(shape: Groups) -> tuple[str, ...]:
    flags = {
        "--dataset-name": "generated-shared-prefix", "--gsp-num-groups": shape.groups,
        "--gsp-prompts-per-group": shape.prompts, "--gsp-system-prompt-len": shape.shared,
        "--gsp-question-len": shape.private, "--gsp-output-len": shape.output,
    }  # fmt: skip
    if shape.zipf is not None:
        flags |= {"--gsp-group-distribution": "zipf", "--gsp-zipf-alpha": shape.zipf}
    words = [word for flag, value in flags.items() for word in (flag, str(value))]
    return (*words, *(["--gsp-ordered"] if shape.ordered else []))
