"""Every environment variable of the plugin, in one table: the fields of Settings.

Settings are read at start only: by the check of SGLang's arguments, so that a bad value stops the
server with a message that names the variable, its value and what is allowed, and as the attention
backend is built.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from sgl_prefix_attn.records import CALIBRATED, FLASHINFER, PREFIX, STOCK, STRATEGIES

BACKEND_NAME = "prefix"  # of --attention-backend
VARIABLE_PREFIX = "PREFIX_ATTN_"

_FLAG = {"0": False, "1": True}
_FOLDER = "a folder"


def _words(*words: str) -> dict[str, str]:
    return {word: word for word in words}


def _variable(default: Any, kind: dict[str, Any] | int | str, doc: str) -> Any:
    return field(default=default, metadata={"kind": kind, "doc": doc})


@dataclass(frozen=True)
class Settings:
    """Values of all variables; PREFIX_ATTN_STRATEGY is `strategy`, and so on."""

    strategy: str = _variable(
        CALIBRATED,
        _words(*STRATEGIES),
        "Profit model that splits or merges each node of the radix tree. Where Hopper's kernels "
        "would run, the server does not start with another than `calibrated` unless "
        "`PREFIX_ATTN_KERNELS=portable` is given, too.",
    )
    policy: str = _variable(
        "auto",
        _words("auto", PREFIX, STOCK),
        "Which kernels decode steps run: decide each step, or force one of them where possible.",
    )
    kernels: str = _variable(
        "auto",
        _words("auto", "hopper", "portable"),
        "Which kernels prefix steps run: Hopper's where GPU and model allow them, else the "
        "portable ones, or one of the two; the server does not start where that one cannot run.",
    )
    fallback: str = _variable(
        "auto",
        _words("auto", FLASHINFER, "default"),
        "Which of SGLang's own backends decodes what no plan does. `default` is SGLang's choice, "
        "or what `--attention-backend` names beside `--decode-attention-backend prefix`; `auto` "
        "is FlashInfer, and the default where FlashInfer cannot serve the model, in deterministic "
        "inference, and on a CPU.",
    )
    prefill: bool = _variable(
        False,
        _FLAG,
        "With 1, and `prefix` as the prefill backend, too: extend batches, those that verify "
        "drafts and a draft model's decode steps may run plans; the latter two with "
        "`--speculative-attention-mode decode` alone, too. In deterministic inference all extend "
        "batches run them.",
    )
    headroom: int = _variable(
        64,
        1,
        "Tokens that every request can grow before a step replans; 8 bytes each, times "
        "`--max-running-requests`.",
    )
    max_variant_bs: int = _variable(
        65536,
        0,
        "Largest decode batch size with a CUDA graph of the prefix kernels beside SGLang's own, "
        "which costs start-up time and memory (the log adds them up); larger captured sizes run "
        "stock attention.",
    )
    check: bool = _variable(
        False,
        _FLAG,
        "Debug: verify the tree against SGLang's slots each step, compare with stock attention.",
    )
    check_every: int = _variable(
        16,
        1,
        "Debug: with CHECK=1, every n-th prefix step runs both backends and compares each layer.",
    )
    dump: str = _variable(
        "",
        _FOLDER,
        "Debug: write decided batches into this folder, for `sgl-prefix-attn explain`: 256 files "
        "of each scheduler process, then over the oldest.",
    )
    dump_every: int = _variable(
        100,
        1,
        "Debug: with DUMP, every n-th decision about a batch is written.",
    )
    cpu_platform: bool = _variable(
        False, _FLAG, "Offer a plain PyTorch CPU platform to SGLang, for machines without a GPU."
    )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """Read all variables (os.environ by default). ValueError, naming each of them: bad or
        unknown ones, and those under the names that they had up to 0.1.2."""
        problems = _bad_names(environ)
        values: dict[str, Any] = {}
        for variable in VARIABLES:
            try:
                values[variable.field] = variable.read(environ)
            except ValueError as error:
                problems.append(str(error))
        if problems:
            raise ValueError("; ".join(problems))
        return cls(**values)

    def describe(self) -> str:
        """Say what differs from the defaults, for the log."""
        given = [
            f"{variable.name}={variable.text(value)}"
            for variable in VARIABLES
            if (value := getattr(self, variable.field)) != variable.default
        ]
        return ", ".join(given) or "default settings"


@dataclass(frozen=True)
class Variable:
    """One environment variable, of the field of Settings of that name.

    kind  what its text may be, with the value that each stands for; or the least integer allowed;
          or in words what any text is taken for
    """

    field: str
    default: Any
    kind: dict[str, Any] | int | str
    doc: str

    @property
    def name(self) -> str:
        return VARIABLE_PREFIX + self.field.upper()

    @property
    def allowed(self) -> str:
        if isinstance(self.kind, str):
            return self.kind
        return f"integer >= {self.kind}" if isinstance(self.kind, int) else " | ".join(self.kind)

    def read(self, environ: Mapping[str, str]) -> Any:
        """Read the variable's value; an unset or empty one is the default.

        Raises ValueError that names variable, value and what is allowed.
        """
        text = environ.get(self.name, "").strip()
        if not text:
            return self.default
        try:
            if isinstance(self.kind, str):
                if text not in _FLAG:  # which mean no folder: one of that name is ./0
                    return text
            elif not isinstance(self.kind, int):
                return self.kind[text]
            elif int(text) >= self.kind:
                return int(text)
        except (ValueError, KeyError):
            pass
        raise ValueError(f"{self.name}={text!r}: allowed is {self.allowed}")

    def text(self, value: Any) -> str:
        """Write a value as the environment has it."""
        return str(int(value) if isinstance(value, bool) else value)


VARIABLES = tuple(Variable(f.name, f.default, **f.metadata) for f in fields(Settings))
# Read by itself where a process must know before, or without, all the others.
CPU_PLATFORM = next(v for v in VARIABLES if v.field == "cpu_platform")


def _bad_names(environ: Mapping[str, str]) -> list[str]:
    known = sorted(variable.name for variable in VARIABLES)
    unknown = sorted(
        name for name in environ if name.startswith(VARIABLE_PREFIX) and name not in known
    )
    problems = []
    if unknown:
        names = f"{', '.join(unknown)}: known are {', '.join(known)}"
        problems.append(f"unknown environment variable {names}")
    for name in known:
        # SGLang copies each variable that begins with SGL_ to one that begins with SGLANG_.
        old = next((old for old in (f"SGL_{name}", f"SGLANG_{name}") if old in environ), None)
        if old:
            problems.append(f"{old} is not read, set {name}")
    return problems
