"""Entry point of the `sgl-prefix-attn` command: one subcommand a module."""

import argparse
import os
import sys

from sgl_prefix_attn import __version__
from sgl_prefix_attn.tools import analyze_command, calibrate_command, doctor, explain_command
from sgl_prefix_attn.tools.exit_status import FAILED, INTERRUPTED, USAGE


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sgl-prefix-attn", description="SGLang plugin tools")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (doctor, calibrate_command, explain_command, analyze_command):
        command.add_parser(commands)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Return a command's exit status; USAGE where it raised ValueError or OSError, which say what
    is wrong with its arguments or a file, INTERRUPTED where it was interrupted."""
    args = build_parser().parse_args(argv)
    try:
        status = args.run(args)
        print(end="", flush=True)  # stdout may be closed
        return status
    except KeyboardInterrupt:
        problem, status = "interrupted", INTERRUPTED
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nor does exiting complain
        return FAILED
    except ValueError as error:
        problem, status = str(error), USAGE
    except OSError as error:
        said = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        problem, status = said, USAGE
    print(f"sgl-prefix-attn {args.command}: {problem}", file=sys.stderr)
    return status
