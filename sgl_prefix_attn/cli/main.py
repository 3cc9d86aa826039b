"""Entry point of the `sgl-prefix-attn` command: one subcommand a module."""

import argparse

from sgl_prefix_attn import __version__
from sgl_prefix_attn.cli import analyze_command, calibrate_command, doctor, explain_command


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sgl-prefix-attn", description="SGLang plugin tools")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    doctor.add_parser(commands)
    calibrate_command.add_parser(commands)
    explain_command.add_parser(commands)
    analyze_command.add_parser(commands)
    return parser


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    return args.run(args)
