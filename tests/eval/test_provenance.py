"""eval.provenance: what a result file says about where it came from."""

import subprocess

import pytest

from eval import provenance


def git(folder, *args):
    identity = ["-c", "user.name=n", "-c", "user.email=e"]
    command = ["git", "-C", folder, *identity, *args]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def peer(tmp_path):
    folder = tmp_path / "peer"
    for name, text in {
        "a.py": "print(1)",
        "csrc/k.cu": "kernel",
        "csrc/k.h": "header",
        "notes.txt": "notes",
        "third_party/cutlass/x.h": "theirs",
        "build/lib/a.py": "copy",
        ".venv/b.py": "hidden",
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_a_checkout_is_its_commit_and_whether_it_was_changed(peer):
    git(peer, "init", "-q")
    git(peer, "add", "-A")
    git(peer, "commit", "-q", "-m", "all")
    head = git(peer, "rev-parse", "HEAD")
    clean = provenance.sources(peer)
    assert (clean["commit"], clean["dirty"], clean["num_files"]) == (head, False, 3)
    (peer / "result.json").write_text("{}")
    assert provenance.sources(peer) == clean
    (peer / "new.py").write_text("")
    assert provenance.sources(peer)["dirty"]
    (peer / "new.py").unlink()
    (peer / "csrc/k.cu").write_text("patched")
    changed = provenance.sources(peer)
    assert (changed["commit"], changed["dirty"]) == (head, True)
    assert changed["sha256"] != clean["sha256"]
    # A part of a checkout is judged by itself.
    part = provenance.sources(peer / "third_party")
    assert (part["commit"], part["dirty"]) == (head, False)


def test_a_folder_inside_another_checkout_has_no_commit(peer):
    git(peer.parent, "init", "-q")
    (peer.parent / "tracked").write_text("")
    git(peer.parent, "add", "tracked")
    git(peer.parent, "commit", "-q", "-m", "one")
    found = provenance.sources(peer)
    assert (found["commit"], found["dirty"], found["num_files"]) == (None, None, 3)


def test_the_digest_is_of_own_sources_their_names_and_contents(peer):
    before = provenance.sources(peer)["sha256"]
    for other in ("notes.txt", "third_party/cutlass/x.h", "build/lib/a.py", ".venv/b.py"):
        (peer / other).write_text("something else")
    assert provenance.sources(peer)["sha256"] == before
    (peer / "a.py").rename(peer / "b.py")
    renamed = provenance.sources(peer)["sha256"]
    (peer / "b.py").write_text("print(2)")
    assert len({before, renamed, provenance.sources(peer)["sha256"]}) == 3


def test_the_own_commit_can_be_stated(monkeypatch):
    monkeypatch.setenv(provenance.COMMIT_ENV, "abc-dirty")
    meta = provenance.collect("eval.x", [])
    assert (meta["commit"], meta["dirty"]) == ("abc", True)
    monkeypatch.delenv(provenance.COMMIT_ENV)
    monkeypatch.setattr(provenance, "ROOT", provenance.Path("/"))
    meta = provenance.collect("eval.x", [])
    assert (meta["commit"], meta["dirty"]) == ("unknown", None)
