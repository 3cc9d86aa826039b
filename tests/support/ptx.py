"""Runs the few PTX instructions of the kernels' inline assembly, all lanes at a time."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import torch

LANES = 32


def run_warp(text: str, outputs: int, inputs: Sequence[np.ndarray], in_place: bool = False):
    """Run inline assembly for the 32 lanes of a warp: returns its outputs $0 on, [32] each.

    inputs    operands behind the outputs, float32 [32] each; any number of lanes where it has no
              constants and none reads another's
    in_place  the first inputs are in the outputs' registers

    Branches must be taken by all lanes or by none. Raises ValueError for an unknown instruction.
    """
    nan = np.full(LANES, np.nan, np.float32)
    registers = {f"${i}": nan for i in range(outputs)}
    registers |= {f"${outputs + i}": np.float32(x) for i, x in enumerate(inputs)}
    if in_place:
        registers |= {f"${i}": registers[f"${outputs + i}"] for i in range(outputs)}
    text = re.sub(r"^\s*{(.*)}\s*$", r"\1", text, flags=re.DOTALL)
    statements = [s.strip() for s in re.split(r";|(?<=:)", text) if s.strip()]
    at = 0
    while at < len(statements):
        statement = statements[at]
        at += 1
        if statement.startswith(".reg") or statement.endswith(":"):
            continue
        if branch := re.fullmatch(r"@!(\w+)\s+bra\s+(\w+)", statement):
            taken = ~registers[branch[1]]
            assert taken.all() or not taken.any(), "lanes part"
            if taken.all():
                at = statements.index(f"{branch[2]}:")
            continue
        name, operands = statement.split(None, 1)
        to, *args = re.findall(r"{.*?}|[^\s,]+", operands)
        registers[to] = _result(name, [_value(registers, arg) for arg in args])
    return [registers[f"${i}"] for i in range(outputs)]


def _value(registers: dict[str, np.ndarray], operand: str):
    if operand.startswith("{"):
        return [registers[part] for part in re.findall(r"\w+", operand)]
    if operand.startswith("0f"):
        return np.full(LANES, np.frombuffer(bytes.fromhex(operand[2:]), ">f4")[0], np.float32)
    if operand.startswith("0x") or operand.isdigit():
        return int(operand, 0)
    return registers[operand]


def _result(name: str, args: list) -> np.ndarray:
    match name.split("."):
        case ["mov", "f32"]:
            return args[0]
        case ["add", "f32"]:
            return args[0] + args[1]
        case ["sub", "f32"]:
            return args[0] - args[1]
        case ["mul", "f32"]:
            return args[0] * args[1]
        case ["max", "f32"]:
            return np.fmax(args[0], args[1])
        case ["ex2", "approx", "ftz", "f32"]:
            return np.exp2(args[0])
        case ["setp", "gt", "f32"]:
            return args[0] > args[1]
        case ["setp", "gt", "or", "f32"]:
            return (args[0] > args[1]) | args[2]
        case ["setp", "neu", "f32"]:
            return args[0] != args[1]
        case ["setp", "neu", "or", "f32"]:
            return (args[0] != args[1]) | args[2]
        case ["selp", "f32"]:
            return np.where(args[2], args[0], args[1])
        case ["vote", "sync", "any", "pred"]:
            return np.full(LANES, args[0].any())
        case ["shfl", "sync", "bfly", "b32"]:
            return args[0][np.arange(LANES) ^ args[1]]
        case ["mov", "b32"]:
            return _packed(*args[0])
        case ["cvt", "rn", "f16x2", "f32"]:  # the first one is the upper half
            return _packed(*(x.astype(np.float16) for x in args[::-1]))
        case ["cvt", "rn", "satfinite", "e4m3x2", "f16x2"]:
            most = torch.finfo(torch.float8_e4m3fn).max
            x = torch.from_numpy(args[0].view(np.float16)).clamp(-most, most)
            return x.to(torch.float8_e4m3fn).view(torch.uint8).numpy().view(np.uint16)
        case ["cvt", "rn", "f16x2", "e4m3x2"]:
            x = torch.from_numpy(args[0].view(np.uint8)).view(torch.float8_e4m3fn)
            return x.to(torch.float16).numpy().view(np.uint32)
        case ["sub", "f16x2"]:
            return (args[0].view(np.float16) - args[1].view(np.float16)).view(np.uint32)
    raise ValueError(f"PTX instruction {name}")


def _packed(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Make uint32 registers of their 16-bit halves."""
    return np.stack((low, high), -1).view(np.uint32)[:, 0]
