"""Every environment variable of the plugin, in one table.

Settings are read once, when the attention backend is built, so that a bad value stops the server
at start with a message that names the variable, its value and what is allowed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

BACKEND_NAME = "prefix"  # of --attention-backend
PREFIX = "SGL_PREFIX_ATTN_"


def _one_of(*allowed: str) -> tuple[Callable[[str], str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError
        return text

    return parse, " | ".join(allowed)


def _flag() -> tuple[Callable[[str], bool], str]:
    def parse(text: str) -> bool:
        return {"0": False, "1": True}[text]

    return parse, "0 | 1"


def _integer(minimum: int) -> tuple[Callable[[str], int], str]:
    def parse(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise ValueError
        return value

    return parse, f"integer >= {minimum}"


@dataclass(frozen=True)
class Variable:
    """One environment variable: field of Settings, parser, what the parser allows, default."""

    field: str
    kind: tuple[Callable[[str], Any], str]
    default: str
    doc: str

    @property
    def name(self) -> str:
        return PREFIX + self.field.upper()

    def read(self, environ: Mapping[str, str]) -> Any:
        """Read the variable's value; an unset or empty one is the default.

        Raises ValueError that names variable, value and what is allowed.
        """
        text = environ.get(self.name, "").strip() or self.default
        parse, allowed = self.kind
        try:
            return parse(text)
        except (ValueError, KeyError):
            raise ValueError(f"{self.name}={text!r}: allowed is {allowed}") from None


VARIABLES = (
    Variable(
        "strategy",
        _one_of("query", "naive", "compute", "pat", "calibrated"),
        "calibrated",
        "Profit model that packs the radix tree into work items.",
    ),
    Variable(
        "policy",
        _one_of("auto", "prefix", "stock"),
        "auto",
        "Which kernels a decode step runs: decide each step, or force one of them where possible.",
    ),
    Variable(
        "headroom",
        _integer(1),
        "64",
        "Tokens that every request can grow before its index segment is full and a step replans.",
    ),
    Variable(
        "max_variant_bs",
        _integer(0),
        "65536",
        "Largest decode batch size with a CUDA graph of the prefix kernels beside SGLang's own; "
        "larger captured sizes run stock attention, 0 is none. Each graph costs start-up time and "
        "memory, which a line in the log adds up.",
    ),
    Variable(
        "check",
        _flag(),
        "0",
        "Debug: verify the tree against SGLang's slots each step, compare with stock attention.",
    ),
    Variable(
        "check_every",
        _integer(1),
        "16",
        "Debug: with CHECK=1, every n-th prefix step runs both backends and compares each layer.",
    ),
    Variable(
        "cpu_platform",
        _flag(),
        "0",
        "Offer a plain PyTorch CPU platform to SGLang, for machines without a GPU.",
    ),
)


@dataclass(frozen=True)
class Settings:
    """Values of VARIABLES, by field."""

    strategy: str = "calibrated"
    policy: str = "auto"
    headroom: int = 64
    max_variant_bs: int = 65536
    check: bool = False
    check_every: int = 16
    cpu_platform: bool = False

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read all variables (os.environ by default). ValueError, naming each of them: bad or
        unknown ones, and those renamed as SGLang advises for everything that begins with SGL_."""
        environ = os.environ if environ is None else environ
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
            f"{variable.name}={int(value) if isinstance(value, bool) else value}"
            for variable in VARIABLES
            if (value := getattr(self, variable.field)) != getattr(Settings, variable.field)
        ]
        return ", ".join(given) or "default settings"


def _bad_names(environ: Mapping[str, str]) -> list[str]:
    known = sorted(variable.name for variable in VARIABLES)
    unknown = sorted(name for name in environ if name.startswith(PREFIX) and name not in known)
    problems = []
    if unknown:
        problems.append(
            f"unknown environment variable {', '.join(unknown)}: known are {', '.join(known)}"
        )
    for name in known:
        # SGLang itself adds such a twin to each that is set.
        twin = name.replace("SGL_", "SGLANG_", 1)
        if twin in environ and name not in environ:
            problems.append(
                f"{twin} is not read, set {name}: SGLang's advice to rename it is about its own"
            )
    return problems


def markdown_table() -> str:
    """Write the environment table of the docs."""
    rows = ["| variable | values | default | meaning |", "| --- | --- | --- | --- |"]
    for variable in VARIABLES:
        allowed = variable.kind[1].replace("|", "\\|")
        rows.append(f"| `{variable.name}` | {allowed} | `{variable.default}` | {variable.doc} |")
    return "\n".join(rows)
