"""Makes a virtual environment and installs what fits this machine, once.

    python requirements/install.py VENV [RELEASE]

Needs only the standard library. RELEASE is one of SGLang's that has a lock here (sglang-*.txt),
without it the newest that this Python runs. The CUDA set where nvidia-smi lists a GPU, the CPU set
otherwise. A stamp in the environment, keyed by what decides its content, makes a second run do
nothing.
"""

import hashlib
import re
import subprocess
import sys
import time
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
LOG = ROOT / "build" / "install.log"
HEARTBEAT_S = 20
# As pip reads it: the release, and the Python that it asks for where that is later than ours.
PIN = re.compile(r"^sglang==(\S+?)(?:; python_version >= '3\.(\d+)')?$", re.MULTILINE)


def main(target: Path, wanted: str = "") -> None:
    release = choose_release(wanted, sys.version_info[1])
    gpu = has_gpu()
    stamp = target / f".installed-{key(release, gpu)}"
    if stamp.exists():
        return
    refuse_anothers(target)
    start = time.monotonic()
    kind = "CUDA" if gpu else "CPU"
    say(f"installing SGLang {release}, {kind} set, into {target} with Python {python_version()}")
    python = target / "bin" / "python"
    if not has_pip(python):
        say(f"making {target}")
        venv.create(target, with_pip=True)
    for label, arguments in pip_steps(release, gpu):
        # Most of what comes is never imported; Python compiles the rest when it is.
        run_step(label, [str(python), "-m", "pip", "install", "--no-compile", *arguments])
    if not gpu:
        add_torchvision_shim(python)
    for old in target.glob(".installed-*"):
        old.unlink()
    stamp.write_text(f"{ROOT}\n")
    say(f"installed in {time.monotonic() - start:.0f} s; the next run installs nothing")


def refuse_anothers(target: Path) -> None:
    """Raise LookupError where another checkout, one that is still there, has this package installed
    from its own sources in the environment: it would run ours from then on."""
    for stamp in target.glob(".installed-*"):
        owner = stamp.read_text().strip()
        if owner and Path(owner) != ROOT and Path(owner, "pyproject.toml").exists():
            raise LookupError(
                f"{target} runs the sources of {owner}; give this checkout an environment of its "
                f"own (make VENV=.venv-mine), or hand that one over: rm {stamp}"
            )


def choose_release(wanted: str, minor: int) -> str:
    """Return the wanted release, or the newest that Python 3.`minor` runs.

    Raises LookupError, with the releases there are, for one without a lock or for a later Python.
    """
    least = locked_releases()
    runnable = [release for release in least if least[release] <= minor]
    if wanted and wanted not in least:
        raise LookupError(f"SGLANG={wanted}: no lock for it, only for {', '.join(least)}")
    if wanted and wanted not in runnable:
        raise LookupError(
            f"SGLang {wanted} needs Python 3.{least[wanted]}, this is {python_version()}, "
            f"which runs {', '.join(runnable)}; name another: "
            f"make PYTHON=/path/to/python SGLANG={wanted}"
        )
    newest = [*least][-1]
    if not wanted and newest not in runnable:
        say(
            f"SGLang {runnable[-1]}, the newest that Python 3.{minor} runs; {newest} needs "
            f"Python 3.{least[newest]}"
        )
    return wanted or runnable[-1]


def locked_releases() -> dict[str, int]:
    """Return the least Python 3 minor by release of SGLang, oldest first, from the locks."""
    pins = [PIN.search(path.read_text()).groups() for path in HERE.glob("sglang-*.txt")]
    pins.sort(key=lambda pin: [int(number) for number in re.findall(r"\d+", pin[0])])
    return {release: int(minor or 0) for release, minor in pins}


def python_version() -> str:
    return sys.version.split()[0]


def has_gpu() -> bool:
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listing.returncode == 0 and "GPU" in listing.stdout


def has_pip(python: Path) -> bool:
    """False as well for an environment whose making was interrupted."""
    command = [python, "-m", "pip", "--version"]
    return python.exists() and subprocess.run(command, capture_output=True).returncode == 0


def key(release: str, gpu: bool) -> str:
    """Digest of all that decides the environment's content."""
    names = ["common.txt", f"sglang-{release}.txt"]
    names += [] if gpu else ["torch-cpu.txt", "cpu.txt"]
    digest = hashlib.sha256(f"{sys.version_info[:2]} {ROOT}".encode())
    for path in (*map(HERE.joinpath, names), *sorted(HERE.glob("*.py")), ROOT / "pyproject.toml"):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def pip_steps(release: str, gpu: bool) -> list[tuple[str, list[str]]]:
    """(what it installs, arguments of `pip install`) in order."""
    common = str(HERE / "common.txt")
    both = ["-r", common, "-r", str(HERE / f"sglang-{release}.txt")]
    this = ["--no-deps", "--no-build-isolation", "--editable", str(ROOT)]
    if gpu:
        steps = [("SGLang with CUDA torch", both)]
    else:
        steps = [
            ("torch", ["-c", common, "-r", str(HERE / "torch-cpu.txt")]),
            ("SGLang and the rest", ["--no-deps", *both, "-r", str(HERE / "cpu.txt")]),
        ]
    return [*steps, ("this package", this)]


def run_step(label: str, command: list[str]) -> None:
    """Run a pip command, its output in the log, a line now and then to show that it is at work."""
    say(f"{label} ...")
    start = time.monotonic()
    LOG.parent.mkdir(exist_ok=True)
    with LOG.open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    while (status := _finished(process)) is None:
        say(f"  {label}: {time.monotonic() - start:.0f} s")
    if status != 0:
        tail = LOG.read_text(errors="replace").splitlines()[-15:]
        print("\n".join(tail), file=sys.stderr)
        sys.exit(f"error: pip could not install {label} (status {status}; all of it in {LOG})")
    say(f"  {label}: done in {time.monotonic() - start:.0f} s")


def _finished(process: subprocess.Popen) -> int | None:
    """Its exit status, None while it still runs after a wait."""
    try:
        return process.wait(HEARTBEAT_S)
    except subprocess.TimeoutExpired:
        return None


def add_torchvision_shim(python: Path) -> None:
    """See torchvision_without_cuda.py."""
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.check_output([python, "-c", query], text=True).strip())
    shim = HERE / "torchvision_without_cuda.py"
    (site / shim.name).write_bytes(shim.read_bytes())
    (site / f"{shim.stem}.pth").write_text(f"import {shim.stem}\n")


def say(text: str) -> None:
    print(f"install: {text}", flush=True)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), *sys.argv[2:])
    except (LookupError, OSError, subprocess.SubprocessError) as error:
        sys.exit(f"error: {error}")
