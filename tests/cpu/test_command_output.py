"""What the commands say while they work, and what they look at before they do."""

import sys

import pytest

from sgl_prefix_attn.tools import explain, explain_command, main, output


def test_a_log_gets_no_bars(capsys):
    with output.busy("planning"):
        pass
    assert capsys.readouterr().err == ""


def test_a_terminal_shows_it_at_once(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with output.busy("planning"):
        pass
    assert "planning" in capsys.readouterr().err


@pytest.fixture
def unplanned(monkeypatch):
    """Planning fails the test."""
    monkeypatch.setattr(explain_command, "plan_view", lambda *_: pytest.fail("it is planned"))


@pytest.mark.parametrize("path", ["no/a.png", ""])
def test_a_folder_of_png_is_tried_before_the_work(unplanned, tmp_path, capsys, path):
    with pytest.raises(SystemExit) as ended:
        main.main(["explain", "1,2_3,4", "--png", str(tmp_path / path)])
    assert ended.value.code == 2
    assert f"argument --png: {tmp_path / path} cannot be written" in capsys.readouterr().err


def test_matplotlib_is_looked_for_before_the_work(unplanned, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    monkeypatch.delitem(sys.modules, "sgl_prefix_attn.tools.explain.figure", raising=False)
    monkeypatch.delattr(explain, "figure", raising=False)
    assert main.main(["explain", "1,2_3,4", "--png", str(tmp_path / "a.png")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
