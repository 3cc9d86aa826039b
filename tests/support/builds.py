"""What kernels over words are compiled from without a GPU (both take the same arguments), and what
ptxas made of them."""

import re
import subprocess
from pathlib import Path

import triton

_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
SPILL = re.compile(r"\b(?:STL|LDL)\b")

POINTERS = {
    "q": "", "k": "", "v": "", "out": "", "lse": "fp32", "partial_out": "fp16",
    "partial_state": "fp32", "counters": "i32", "words": "i32", "slots": "i32", "keys": "i32",
    "sinks": "",  # of a server's layers; the library's are float32
}  # fmt: skip
SCALARS = ("sm_scale", "logits_soft_cap", "v_scale")
STRIDES = ("stride_q", "stride_k", "stride_v", "stride_out")


def signature_of(
    constants: dict, dtype: str, kv_dtype: str | None = None
) -> tuple[dict, dict, dict]:
    """Return signature, constants and attributes as ASTSource takes them, pointers and strides
    aligned as a server's are; dtype of q, and of the caches without a kv_dtype, as Triton names
    it."""
    invariant = {"partial_out": "fp32"} if constants["INVARIANT"] else {}
    kinds = POINTERS | invariant | dict.fromkeys(("k", "v"), kv_dtype or "")
    signature = {f"{name}_ptr": f"*{kind or dtype}" for name, kind in kinds.items()}
    signature |= dict.fromkeys(STRIDES, "i32")
    signature |= dict.fromkeys(SCALARS, "fp32")
    if not constants["HAS_SINK"]:
        constants = constants | {"sinks_ptr": None}
    signature |= dict.fromkeys(constants, "constexpr")
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, kind in enumerate(signature.values())
        if kind not in ("fp32", "constexpr")
    }
    return signature, constants, aligned


def disassembled(compiled, folder: Path) -> tuple[str, str]:
    """Return a kernel's machine code, and its registers, stack and local memory."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    return _tool("nvdisasm", "-c", cubin), _tool("cuobjdump", "-res-usage", cubin)


def _tool(name: str, *args) -> str:
    return subprocess.run([_TOOLS / name, *args], capture_output=True, text=True, check=True).stdout


def loops_of(sass: str) -> tuple[str, list[tuple[int, int]]]:
    """Return machine code without its labels, and where in it each jump back goes from and to."""
    parts = re.split(r"^(\.L_x_\d+):", sass, flags=re.M)
    start, found, end = {}, [], 0
    for part in parts:
        if part.startswith(".L_x_"):
            start[part] = end
        for jump in re.finditer(r"BRA.*`\((\.L_x_\d+)\)", part):
            if jump[1] in start:
                found.append((start[jump[1]], end + jump.end()))
        end += len(part)
    return "".join(parts), found


def barriers_made(sass: str) -> int:
    """Count the barriers that mbarrier.init makes: all that are used, and no store is to them."""
    made = _places(sass, r"SYNCS\.EXCH\.64 URZ,")
    waited = _places(sass, r"SYNCS\.PHASECHK\S* P\d,")
    arrived = _places(sass, r"(?:ARRIVES|SYNCS\.ARRIVE)[^\[]*")
    assert waited and arrived and {*waited, *arrived} <= {*made}
    assert not [x for x in _places(sass, r"STS\S*") if min(made) <= x < max(made) + 8]
    assert len(made) == len({*made})
    return len(made)


def single_arrivals(ptx: str) -> int:
    """Count the arrivals that one thread makes for its warpgroup, each of which must be right
    behind a barrier: what the others have read by then may be overwritten."""
    lines = (line.strip() for line in ptx.splitlines())
    code = [line for line in lines if not re.match(r"$|//|\.loc|\$L__tmp|(add|mov|xor)\.", line)]
    found = [i for i, line in enumerate(code) if re.match(r"@%p\d+ mbarrier\.arrive\.", line)]
    assert all(code[i - 1].startswith("bar.sync") for i in found)
    return len(found)


def _places(sass: str, instruction: str) -> list[int]:
    """Return the offsets in shared memory that an instruction adds to a register."""
    found = re.findall(rf"\b{instruction} \[U?R\d+(?:\+U?R(?:\d+|Z))?(?:\+0x([0-9a-f]+))?\]", sass)
    return [int(offset or "0", 16) for offset in found]
