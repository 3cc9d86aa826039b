"""`sgl-prefix-attn doctor`: can `--attention-backend prefix` work here, and what to do if not."""

import argparse
import contextlib
import os
import warnings
from dataclasses import asdict
from pathlib import Path

import orjson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sgl_prefix_attn.tools.argument_types import count
from sgl_prefix_attn.tools.doctor_checks import (
    FAIL,
    OK,
    WARN,
    Check,
    of_such_layers,
    run_checks,
)
from sgl_prefix_attn.tools.doctor_facts import chosen_family, gather
from sgl_prefix_attn.tools.exit_status import FAILED
from sgl_prefix_attn.tools.model_heads import NotSaid, config_and_heads
from sgl_prefix_attn.tools.output import busy, table_console

WIDTH = 100  # columns: what is found can be a long sentence
_STYLE = {OK: "green", WARN: "yellow", FAIL: "bold red"}


def add_parser(commands) -> None:
    parser = commands.add_parser("doctor", help="what is installed, what would not work, and why")
    parser.add_argument(
        "--model",
        type=Path,
        help="folder of a Hugging Face model, or config.json: what would its steps run?",
    )
    parser.add_argument("--tp", type=count, default=1, help="tensor-parallel size (default: 1)")
    parser.add_argument("--json", action="store_true", help="print the checks as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Return exit status 0 when the backend can work, FAILED when it could not. Raises ValueError
    for a model that cannot be read, and for --tp without one."""
    warnings.simplefilter("ignore")  # SGLang's imports warn about kernels this machine cannot run
    model = args.model
    if model is None and args.tp != 1:
        raise ValueError("--tp: only with --model")
    if model is not None:
        with contextlib.suppress(NotSaid):
            config_and_heads(model, args.tp)  # before the seconds that the rest takes
        if model.is_file():
            model = model.parent  # as SGLang reads one
    with busy("looking at this machine, and importing SGLang"):
        facts = gather()
        checks = run_checks(facts)
        if model is not None:
            checks.append(
                Check("model", WARN, "not looked at without SGLang")
                if facts.sglang_error
                else check_model(model, args.tp, facts.gpu)
            )
    if args.json:
        report = {"ok": works(checks), "checks": [asdict(check) for check in checks]}
        print(orjson.dumps(report, option=orjson.OPT_INDENT_2).decode())
    else:
        render(checks, table_console(most=WIDTH))
    return 0 if works(checks) else FAILED


def works(checks: list[Check]) -> bool:
    return all(check.status != FAIL for check in checks)


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


def check_model(folder: Path, tp: int, gpu: str) -> Check:
    """Read a model's config, which is readable, and ask SGLang what it would choose for it here.

    gpu  its name, "" without one
    """
    # Not before: these import torch and SGLang.
    import torch

    from sgl_prefix_attn.execute.backends.choice import why_no_backend, why_no_hopper
    from sgl_prefix_attn.plugin.model_outlook import fallback_of, outlook, sglangs_choice
    from sgl_prefix_attn.predict.startup import gpu_key, look_up

    found = outlook(folder, tp)
    if found.unread:
        fix = "correct what the error names in its config.json, or ask where its server will run"
        return Check("model", FAIL, found.unread, fix)
    if found.refused:
        return Check("model", FAIL, found.refused, "serve it without --attention-backend prefix")
    backend = (gpu and sglangs_choice(folder, tp)) or "choice for the server's GPU"
    layers, stock = found.planned, found.stock
    if layers is not None:
        if not gpu:
            return Check("model", OK, found.layers)
        device = torch.device("cuda")
        on_gpu = device, layers.heads, layers.dtype, layers.kv_dtype
        stock = why_no_backend(*on_gpu) or ""
    if layers is None or stock:
        detail = f"every step of this model runs SGLang's own {backend} ({stock})"
        fix = "such a server starts, and gains nothing from the plugin"
        return Check("model", WARN, detail, fix)
    try:
        beside = fallback_of(found, backend)
        family = chosen_family(os.environ, why_no_hopper(*on_gpu)).name
    except ValueError as error:
        return Check("model", FAIL, str(error), "change or unset what is named here")
    key = gpu_key(family, device, layers.heads, layers.kv_dtype, 1, beside.name)
    known = look_up(key, device)
    detail = f"{found.layers}; stock decode by SGLang's {beside}; {known.message}"
    if of_such_layers(known):
        return Check("model", OK, detail)
    return Check("model", WARN, detail, "times predicted for it may be off")
