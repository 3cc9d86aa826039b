"""python -m eval.sanitize: the kernels under compute-sanitizer's memcheck and racecheck.

Without --case this process runs each small case by itself, then under each tool, prints the tools'
summaries and ends with 1 when one of them found an error: the portable kernel, and on Hopper its
own. --plant plants faults that the tools must find: in each case a KV slot beyond the pool, in
Hopper's also a read that does not wait for its copy. Status 1 when one of them is not found, 2
without a GPU or without compute-sanitizer.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys

import torch

from eval.sanitize.cases import CASES, HEADS, SLOT, run_case
from eval.sanitize.races import EARLY_READ, Races, plant_early_read
from sgl_prefix_attn.execute.backends.choice import why_no_hopper
from sgl_prefix_attn.execute.backends.family import HOPPER, PORTABLE

MEMCHECK, RACECHECK = "memcheck", "racecheck"
# What --plant plants, and the tool that must find it.
FAULTS = {PORTABLE: ((SLOT, MEMCHECK),), HOPPER: ((SLOT, MEMCHECK), (EARLY_READ, RACECHECK))}
_CASE = (sys.executable, "-m", "eval.sanitize", "--case")
_FOUND = 86  # exit status that the sanitizer gives for an error
_TIMEOUT_S = 540
_REPORTED = 60  # lines of a tool's report that are printed


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.sanitize", description=__doc__)
    parser.add_argument("--plant", action="store_true", help="faults that must be found")
    inner = parser.add_argument_group("run one case, as this command does under the tools")
    inner.add_argument("--case", choices=list(CASES))
    inner.add_argument("--fault", choices=[SLOT, EARLY_READ])
    args = parser.parse_args(argv)
    if args.case:
        if args.fault == EARLY_READ:
            plant_early_read()
        return run_case(args.case, plant=args.fault == SLOT)
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"])
    sanitizer = shutil.which("compute-sanitizer", path=path)
    if not torch.cuda.is_available() or sanitizer is None:
        missing = "a GPU" if sanitizer else "compute-sanitizer (part of the CUDA toolkit)"
        print(f"eval.sanitize needs {missing}", file=sys.stderr)
        return 2
    why_not = why_no_hopper(torch.device("cuda"), HEADS, torch.bfloat16)
    if why_not is not None:
        print(f"Hopper's kernel does not run here: {why_not}")
    names = [PORTABLE] if why_not else list(CASES)
    check = _finds_faults if args.plant else _is_clean
    return 0 if all([check(sanitizer, name) for name in names]) else 1


def _is_clean(sanitizer: str, name: str) -> bool:
    """Run one case by itself, then under the tools; whether all is right."""
    try:
        failed = subprocess.run([*_CASE, name], timeout=_TIMEOUT_S).returncode != 0
    except subprocess.TimeoutExpired:
        failed = True
    if failed:
        print(f"the case {name} fails without a sanitizer", file=sys.stderr)
        return False
    return not any([_errors(sanitizer, tool, name) for tool in (MEMCHECK, RACECHECK)])


def _finds_faults(sanitizer: str, name: str) -> bool:
    all_found = True
    for fault, tool in FAULTS[name]:
        found = _errors(sanitizer, tool, name, fault) > 0
        print(f"{name}, {fault}, {tool}: {'found' if found else 'NOT FOUND'}")
        all_found = all_found and found
    return all_found


def _errors(sanitizer: str, tool: str, name: str, fault: str | None = None) -> int:
    """Count the errors that a tool reports for the case; print its summary, and the report of any.
    A tool that did not finish counts as an error, unless a planted fault was the reason."""
    # One allocation per tensor: inside PyTorch's large blocks an access out of bounds looks valid.
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    options = ["--fault", fault] if fault else []
    try:
        done = subprocess.run(
            [sanitizer, "--tool", tool, "--error-exitcode", str(_FOUND), *_CASE, name, *options],
            env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=_TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        print(f"{tool}: not done after {_TIMEOUT_S} s")
        return int(not fault)
    lines = [line for line in done.stdout.splitlines() if "SUMMARY" in line]
    print(f"{tool}: exit status {done.returncode}; {lines[-1] if lines else 'no summary'}")
    if tool == RACECHECK:
        races = Races.of(done.stdout)
        if races.of_the_compiler:
            print(f"{races.of_the_compiler} of them are in what Triton starts warps by")
        errors, failed = races.ours, done.returncode not in (0, _FOUND)
    else:
        summary = re.findall(r"={4,} ERROR SUMMARY: (\d+) ", done.stdout)
        errors, failed = int(summary[-1]) if summary else 0, done.returncode != 0
    if errors or (failed and not fault):
        print("\n".join(done.stdout.splitlines()[:_REPORTED]))
    return errors if fault else errors or int(failed or not lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
