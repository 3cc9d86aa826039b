"""`sgl-prefix-attn doctor`: can `--attention-backend prefix` work here, and what to do if not."""

import argparse
import warnings
from dataclasses import asdict

import orjson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sgl_prefix_attn.cli.doctor_checks import FAIL, OK, WARN, Check, run_checks
from sgl_prefix_attn.cli.doctor_facts import gather
from sgl_prefix_attn.cli.output import table_console

_STYLE = {OK: "green", WARN: "yellow", FAIL: "bold red"}


def add_parser(commands) -> None:
    parser = commands.add_parser("doctor", help="what is installed, what would not work, and why")
    parser.add_argument("--json", action="store_true", help="print the checks as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit status 0 when the backend can work, 1 when it could not."""
    warnings.simplefilter("ignore")  # SGLang's imports warn about kernels this machine cannot run
    checks = run_checks(gather())
    if args.json:
        print(to_json(checks))
    else:
        render(checks, table_console())
    return 0 if works(checks) else 1


def works(checks: list[Check]) -> bool:
    return all(check.status != FAIL for check in checks)


def to_json(checks: list[Check]) -> str:
    report = {"ok": works(checks), "checks": [asdict(check) for check in checks]}
    return orjson.dumps(report, option=orjson.OPT_INDENT_2).decode()


def render(checks: list[Check], console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("", "check", "found"):
        table.add_column(column, overflow="fold")
    for check in checks:
        table.add_row(Text(check.status, _STYLE[check.status]), check.name, Text(check.detail))
    console.print(table)
    for check in checks:
        if check.fix:
            console.print(Text(f"{check.status}: {check.name}: {check.fix}", _STYLE[check.status]))
    can, style = ("can", _STYLE[OK]) if works(checks) else ("cannot", _STYLE[FAIL])
    console.print(f"--attention-backend prefix {can} work here.", style=style)
