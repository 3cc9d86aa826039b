"""eval.sanitize without a sanitizer: its cases, what it plants, and how it reads reports."""

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from eval.sanitize import __main__ as sanitize
from eval.sanitize.cases import CASES, SLOT, run_case
from eval.sanitize.races import EARLY_READ, Races, _starts_of_warps
from sgl_prefix_attn.execute.backends import hopper_backend
from sgl_prefix_attn.execute.backends.torch_backend import TorchBackend
from tests.support.torch_hopper import TorchHopper

BUILT = """
import sys
from eval.sanitize.races import plant_early_read
from tests.cpu.test_hopper_build import build
if sys.argv[1] != "plain":
    plant_early_read()
print(build(8, 4, 64).asm["ptx"])
"""


@pytest.mark.parametrize("name", CASES)
def test_what_the_sanitizer_runs_is_right_and_a_planted_slot_is_beyond(name, monkeypatch, capsys):
    monkeypatch.setattr(hopper_backend, "HopperBackend", TorchHopper)
    assert run_case(name, device="cpu") == 0
    assert f"case {name}: 24 requests" in capsys.readouterr().out
    with pytest.raises(IndexError):
        run_case(name, plant=True, device="cpu")
    monkeypatch.setattr(TorchBackend, "forward", lambda *args: None)
    assert run_case(name, device="cpu") == 1


@pytest.mark.long
@pytest.mark.parametrize("variant", ["plain", EARLY_READ])
def test_the_planted_fault_reads_before_it_waits(variant, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", BUILT, variant], capture_output=True, text=True, check=True
    )
    # the loads of a block's keys are the only ones of two words: before the wait, or behind the
    # products that follow it
    consumer = re.findall(r"mbarrier\.try_wait|wgmma\.mma_async|ld\.shared\.v2\.b32", done.stdout)
    first = consumer.index("ld.shared.v2.b32")
    assert ("wgmma.mma_async" in consumer[:first]) == (variant != EARLY_READ)


def report(*places, kind="Error"):
    first, *others = (f"access at row_tile_kernel+0x1a0 in {place}" for place in places)
    lines = [f"========= {kind}: Race reported between Read {first}"]
    lines += [f"=========     and Write {other} [24 hazards]" for other in others]
    return "\n".join([*lines, "========= ", ""])


def test_what_triton_starts_warps_by_is_told_from_races_of_ours():
    start, specialize = sorted(_starts_of_warps(), key=lambda place: int(place.split(":")[1]))
    theirs = report(start, start, specialize)
    ours = report("consumer.py:157", "producer.py:99", "producer.py:106")
    warning = report("producer.py:99", "producer.py:106", kind="Warning")
    mixed = report(start, "producer.py:48")
    summary = "========= RACECHECK SUMMARY: 5 hazards displayed (4 errors, 1 warnings)\n"
    assert Races.of(theirs + theirs + summary) == Races(0, 2)
    assert Races.of(ours + theirs + warning + mixed + summary) == Races(3, 1)
    assert Races.of(summary) == Races(0, 0)


CLEAN = {
    "memcheck": "========= ERROR SUMMARY: 0 errors\n",
    "racecheck": "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n",
}
FOUND = {
    "memcheck": "========= ERROR SUMMARY: 33 errors\n",
    "racecheck": report("consumer.py:150", "producer.py:101") + CLEAN["racecheck"],
}


@pytest.fixture
def tools(monkeypatch):
    """A sanitizer that answers (text, status) by tool and fault; asked: what it was given."""
    made = SimpleNamespace(answers={}, asked=[], plain=0, slow=None)

    def run(command, **_):
        if made.slow == command[0]:
            raise subprocess.TimeoutExpired(command, 1)
        if command[0] != "sanitizer":
            return SimpleNamespace(returncode=made.plain)
        made.asked.append(command)
        tool, fault = command[2], command[-1] if "--fault" in command else None
        text, status = made.answers.get((tool, fault), (CLEAN[tool], 0))
        return SimpleNamespace(stdout=text, returncode=status)

    monkeypatch.setattr(sanitize.subprocess, "run", run)
    monkeypatch.setattr(sanitize.shutil, "which", lambda *_, **__: "sanitizer")
    monkeypatch.setattr(sanitize.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sanitize, "why_no_hopper", lambda *_: None)
    return made


@pytest.mark.parametrize("slow", ["sanitizer", sanitize._CASE[0]])
def test_what_is_not_done_in_time_is_status_1(tools, slow):
    tools.slow = slow
    assert sanitize.main([]) == 1


def test_a_case_that_fails_or_an_error_of_a_tool_is_status_1(tools):
    assert sanitize.main([]) == 0
    asked = [command[2] for command in tools.asked]
    assert asked == ["memcheck", "racecheck"] * 2, "both tools, in both cases"
    tools.answers["racecheck", None] = FOUND["racecheck"], 86
    assert sanitize.main([]) == 1
    tools.answers["racecheck", None] = report(*_starts_of_warps()) + CLEAN["racecheck"], 86
    assert sanitize.main([]) == 0, "the compiler's own"
    for ended_early in (("", 1), (CLEAN["memcheck"], 1), ("", 0)):
        tools.answers["memcheck", None] = ended_early
        assert sanitize.main([]) == 1, ended_early
    del tools.answers["memcheck", None]
    tools.plain = 1
    assert sanitize.main([]) == 1


def test_each_planted_fault_must_be_found(tools, capsys):
    tools.answers["memcheck", SLOT] = FOUND["memcheck"], 86
    assert sanitize.main(["--plant"]) == 1
    assert f"hopper, {EARLY_READ}, racecheck: NOT FOUND" in capsys.readouterr().out
    tools.answers["racecheck", EARLY_READ] = FOUND["racecheck"], 86
    assert sanitize.main(["--plant"]) == 0
    del tools.answers["memcheck", SLOT]
    assert sanitize.main(["--plant"]) == 1
