"""Every environment variable of the plugin, in one table: the fields of Settings.

Settings are read once, when the attention backend is built, so that a bad value stops the server
at start with a message that names the variable, its value and what is allowed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

BACKEND_NAME = "prefix"  # of --attention-backend
PREFIX = "SGL_PREFIX_ATTN_"

_FLAG = {"0": False, "1": True}
_FOLDER = "a folder"


def _words(*words: str) -> dict[str, str]:
    return {word: word for word in words}


def _variable(default: Any, kind: dict[str, Any] | int | str, doc: str) -> Any:
    return field(default=default, metadata={"kind": kind, "doc": doc})


@dataclass(frozen=True)
class Settings:
    """Values of all variables; SGL_PREFIX_ATTN_STRATEGY is `strategy`, and so on."""

    strategy: str = _variable(
        "calibrated",
        _words("query", "naive", "compute", "pat", "calibrated"),
        "Profit model that packs the radix tree into work items.",
    )
    policy: str = _variable(
        "auto",
        _words("auto", "prefix", "stock"),
        "Which kernels a decode step runs: decide each step, or force one of them where possible.",
    )
    kernels: str = _variable(
        "auto",
        _words("auto", "row_tiles", "triton"),
        "Which kernels prefix steps run: row tiles where GPU and model allow them, or one of the "
        "two families; the server refuses to start where that one cannot run. Row tiles are "
        "Hopper's and know the strategy `calibrated` alone.",
    )
    prefill: bool = _variable(
        False,
        _FLAG,
        "With 1, where `prefix` is the prefill backend, too: extend batches whose requests share "
        "cached prefixes run row tiles where that is predicted to be faster. So do batches that "
        "verify drafts, and a draft model's decode steps; with `--speculative-attention-mode "
        "decode` these need no variable. Off by default: first tokens gain little.",
    )
    headroom: int = _variable(
        64,
        1,
        "Tokens that every request can grow before its index segment is full and a step replans; "
        "8 bytes each (packs: 4), times `--max-running-requests`.",
    )
    max_variant_bs: int = _variable(
        65536,
        0,
        "Largest decode batch size with a CUDA graph of the prefix kernels beside SGLang's own; "
        "larger captured sizes run stock attention, 0 is none. Each graph costs start-up time and "
        "memory, which a line in the log adds up.",
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
        "Debug: write decided batches into this folder, for `sgl-prefix-attn explain`: at most 256 "
        "files of each scheduler process, then over the oldest.",
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
        unknown ones, and those renamed as SGLang advises for everything that begins with SGL_."""
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
        return PREFIX + self.field.upper()

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
        if isinstance(self.kind, str):
            return text
        try:
            if not isinstance(self.kind, int):
                return self.kind[text]
            if int(text) >= self.kind:
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
    unknown = sorted(name for name in environ if name.startswith(PREFIX) and name not in known)
    problems = []
    if unknown:
        names = f"{', '.join(unknown)}: known are {', '.join(known)}"
        problems.append(f"unknown environment variable {names}")
    for name in known:
        twin = name.replace("SGL_", "SGLANG_", 1)
        if twin in environ and name not in environ:  # SGLang itself adds a twin to each that is set
            problems.append(
                f"{twin} is not read, set {name}: SGLang's advice to rename it is about its own"
            )
    return problems
