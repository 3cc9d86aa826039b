"""The locks of requirements/ agree with each other, the table of releases and pyproject.toml."""

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from sgl_prefix_attn.plugin.versions import RELEASES

ROOT = Path(__file__).resolve().parents[2]
LOCKS = sorted((ROOT / "requirements").glob("sglang-*.txt"))


@pytest.fixture
def install():
    spec = importlib.util.spec_from_file_location("install", ROOT / "requirements" / "install.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def locks(install, tmp_path, monkeypatch):
    """install.py over three made-up locks; 0.9.12 needs Python 3.11."""
    releases = {"0.9.10": "", "0.9.12": "; python_version >= '3.11'", "0.9.9": ""}
    for release, marker in releases.items():
        (tmp_path / f"sglang-{release}.txt").write_text(f"a==1\nsglang=={release}{marker}\nz==2\n")
    monkeypatch.setattr(install, "HERE", tmp_path)
    return install


def requirements(path: Path) -> list[Requirement]:
    lines = (line for line in path.read_text().splitlines() if not line.startswith("#"))
    return [Requirement(line) for line in lines]


def test_every_supported_release_has_a_lock(install):
    locked = install.locked_releases()
    assert {release.version for release in RELEASES} <= set(locked)
    assert all(release.python == (3, max(10, locked[release.version])) for release in RELEASES)


def test_the_extra_admits_the_releases_from_the_oldest_lock_to_the_newest(install):
    oldest, *_, newest = install.locked_releases()
    project = (ROOT / "pyproject.toml").read_text()
    assert f'sglang = ["sglang>={oldest},<={newest}"]' in project


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.stem)
def test_a_lock_pins_its_own_release_and_the_same_packages_as_the_others(lock):
    pins = {pin.name: str(pin.specifier) for pin in requirements(lock)}
    assert lock.name == f"sglang-{pins['sglang'].removeprefix('==')}.txt"
    assert set(pins) == {pin.name for pin in requirements(LOCKS[0])}


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12"])
def test_each_package_has_one_exact_version_on_each_python(python):
    paths = [ROOT / "requirements" / f"{name}.txt" for name in ("common", "torch-cpu", "cpu")]
    pins = [pin for path in (*paths, LOCKS[0]) for pin in requirements(path)]
    held = [
        pin.name
        for pin in pins
        if pin.marker is None or pin.marker.evaluate({"python_version": python})
    ]
    assert len(held) == len(set(held))
    assert set(held) >= {"mypy", "numpy", "pytest", "ruff", "sglang", "torch", "triton"}
    assert all(re.fullmatch("==[^,*]+", str(pin.specifier)) for pin in pins)


@pytest.mark.parametrize(
    ("wanted", "minor", "chosen"),
    [("", 12, "0.9.12"), ("", 11, "0.9.12"), ("", 10, "0.9.10"), ("0.9.9", 12, "0.9.9")],
)
def test_the_newest_release_that_this_python_runs_unless_another_is_wanted(
    locks, wanted, minor, chosen
):
    assert locks.choose_release(wanted, minor) == chosen


def test_an_older_release_than_the_newest_is_said_in_one_line(locks, capsys):
    locks.choose_release("", 10)
    assert capsys.readouterr().out == (
        "install: SGLang 0.9.10, the newest that Python 3.10 runs; 0.9.12 needs Python 3.11\n"
    )
    locks.choose_release("", 11)
    locks.choose_release("0.9.9", 10)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("wanted", "minor", "message"),
    [
        ("0.9.1", 12, "SGLANG=0.9.1: no lock for it, only for 0.9.9, 0.9.10, 0.9.12"),
        ("0.9.12", 10, "SGLang 0.9.12 needs Python 3.11, .*, which runs 0.9.9, 0.9.10; "),
    ],
)
def test_a_release_that_cannot_be_is_refused_with_those_that_can(locks, wanted, minor, message):
    with pytest.raises(LookupError, match=message):
        locks.choose_release(wanted, minor)


def test_an_environment_of_another_checkout_is_not_repointed(install, tmp_path):
    """Whose stamp names it; a checkout that has moved away or is gone gives it up."""
    target, other = tmp_path / ".venv", tmp_path / "other"
    target.mkdir()
    install.refuse_anothers(target)
    stamp = target / ".installed-0123"
    stamp.touch()  # of a version that wrote no name
    install.refuse_anothers(target)
    stamp.write_text(f"{install.ROOT}\n")
    install.refuse_anothers(target)
    stamp.write_text(f"{other}\n")
    install.refuse_anothers(target)
    other.mkdir()
    (other / "pyproject.toml").touch()
    with pytest.raises(LookupError, match=f"runs the sources of {other}; .* rm {stamp}"):
        install.refuse_anothers(target)
    with pytest.raises(LookupError, match="runs the sources"):
        install.main(target)


def test_a_link_to_an_environment_is_ignored():
    done = subprocess.run(
        ["git", "check-ignore", "--no-index", "-v", ".venv"], cwd=ROOT, capture_output=True
    )
    if done.returncode == 128:
        pytest.skip("no git, or no checkout")
    (pattern,) = re.findall(rb":(\S+)\t", done.stdout)
    assert not pattern.endswith(b"/"), "which is for folders alone"


def test_the_stamp_tells_releases_and_sets_apart(install):
    keys = {install.key(release, gpu) for release in install.locked_releases() for gpu in (0, 1)}
    assert len(keys) == 2 * len(LOCKS)
