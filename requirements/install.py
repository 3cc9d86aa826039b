"""Makes .venv and installs the pinned set that fits this machine, once.

    python requirements/install.py VENV

Needs only the standard library. The CUDA set where nvidia-smi lists a GPU, the CPU set otherwise.
A stamp in the environment, keyed by what decides its content, makes a second run do nothing.
"""

import hashlib
import subprocess
import sys
import time
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
LOG = ROOT / "build" / "install.log"
HEARTBEAT_S = 20


def main(target: Path) -> None:
    gpu = has_gpu()
    stamp = target / f".installed-{key(gpu)}"
    if stamp.exists():
        return
    start = time.monotonic()
    kind = "CUDA" if gpu else "CPU"
    say(f"installing the {kind} set into {target} with Python {sys.version.split()[0]}")
    python = target / "bin" / "python"
    if not has_pip(python):
        say(f"making {target}")
        venv.create(target, with_pip=True)
    for label, arguments in pip_steps(gpu):
        run_step(label, [str(python), "-m", "pip", "install", *arguments])
    if not gpu:
        add_torchvision_shim(python)
    for old in target.glob(".installed-*"):
        old.unlink()
    stamp.touch()
    say(f"installed in {time.monotonic() - start:.0f} s; the next run installs nothing")


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


def key(gpu: bool) -> str:
    """Digest of all that decides the environment's content."""
    files = [HERE / name for name in (("gpu.txt",) if gpu else ("torch-cpu.txt", "cpu.txt"))]
    digest = hashlib.sha256(f"{sys.version_info[:2]} {ROOT}".encode())
    for path in (*files, *sorted(HERE.glob("*.py")), ROOT / "pyproject.toml"):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def pip_steps(gpu: bool) -> list[tuple[str, list[str]]]:
    """(what it installs, arguments of `pip install`) in order."""
    this = ["--no-deps", "--no-build-isolation", "--editable", str(ROOT)]
    if gpu:
        steps = [("SGLang with CUDA torch", ["-r", str(HERE / "gpu.txt")])]
    else:
        steps = [
            ("torch", ["-r", str(HERE / "torch-cpu.txt")]),
            ("SGLang and the rest", ["--no-deps", "-r", str(HERE / "cpu.txt")]),
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
        main(Path(sys.argv[1]))
    except (OSError, subprocess.SubprocessError) as error:
        sys.exit(f"error: {error}")
