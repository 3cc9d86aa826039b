"""eval.arguments: a bad value ends with usage, and the message names the argument."""

import argparse

import pytest

from eval.arguments import amount, several
from sgl_prefix_attn.cli.argument_types import count


@pytest.fixture
def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=count)
    parser.add_argument("--seconds", type=amount)
    parser.add_argument("--sizes", type=several(count), default="1,16")
    return lambda *argv: parser.parse_args(argv)


def test_good_values(parse):
    args = parse("--repeats", "3", "--seconds", "0.5")
    assert (args.repeats, args.seconds, args.sizes) == (3, 0.5, [1, 16])
    assert parse("--sizes", "37").sizes == [37]


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("--repeats", "0", "must be at least 1, got 0"),
        ("--repeats", "1.5", "'1.5' is no integer"),
        ("--seconds", "0", "must be above 0 and finite, got 0"),
        ("--seconds", "nan", "must be above 0 and finite, got nan"),
        ("--seconds", "inf", "must be above 0 and finite, got inf"),
        ("--seconds", "x", "'x' is no number"),
        ("--sizes", "1,,2", "'' is no integer"),
        ("--sizes", "16,-1", "must be at least 1, got -1"),
    ],
)
def test_the_message_names_the_argument(parse, capsys, name, value, problem):
    with pytest.raises(SystemExit):
        parse(f"{name}={value}")
    assert f"argument {name}: {problem}" in capsys.readouterr().err
