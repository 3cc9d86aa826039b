"""SGLang's own few-shot GSM8K on a server of each backend; for a real checkpoint."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

from eval.engine_process import EngineError
from eval.server_process import ServerError, ServerProcess, backend_server

_SIGNIFICANT = 3  # standard errors of a difference of two accuracies


def judge_servers(folder: Path, args) -> list[dict]:
    """Return a row for each backend, judged by the first one's. Raises EngineError."""
    rows: list[dict] = []
    for backend in args.backends:
        try:
            with backend_server(
                backend,
                args.model_path,
                folder,
                arguments=("--random-seed", "1", "--enable-metrics"),
                on_cpu=args.device.type == "cpu",
            ) as server:
                server.wait_until_healthy()
                said = _ask(server, folder, args)
                steps = _prefix_steps(server)
        except ServerError as error:
            raise EngineError(f"{backend}: {error}\n{error.log_tail}") from None
        found = figures(said)
        first = rows[0]["accuracy"] if rows else found["accuracy"]
        wrong = problem(first, found["accuracy"], args.questions)
        rows.append(
            {"backend": backend, "questions": args.questions, **found}
            | {"prefix_steps": steps, "problem": wrong}
        )
        print(
            f"  {backend}: accuracy {found['accuracy']:.3f}, invalid {found['invalid']:.3f}, "
            f"{steps} prefix steps"
        )
        if wrong:
            print(f"    WRONG: {wrong}", flush=True)
    return rows


def figures(said: str) -> dict[str, float]:
    """Read what few_shot_gsm8k prints. Raises EngineError, with its output."""
    found = dict(re.findall(r"^(Accuracy|Invalid): ([0-9.]+)$", said, re.MULTILINE))
    if len(found) < 2:
        raise EngineError(f"few_shot_gsm8k printed no accuracy:\n{said}")
    return {name.lower(): float(value) for name, value in found.items()}


def problem(first: float, other: float, questions: int) -> str | None:
    """Say that two accuracies differ by more than chance would have it, or return None."""
    mean = (first + other) / 2
    allowed = _SIGNIFICANT * math.sqrt(2 * mean * (1 - mean) / questions)
    if abs(first - other) <= allowed:
        return None
    return f"accuracy {other:.3f}, the first backend's {first:.3f}, chance {allowed:.3f}"


def _prefix_steps(server: ServerProcess) -> int:
    name, variant = "sglang:prefix_attn_steps_total", ("variant", "prefix")
    counters = server.counters().items()
    return int(sum(n for (found, labels), n in counters if found == name and variant in labels))


def _ask(server: ServerProcess, folder: Path, args) -> str:
    place = urlsplit(server.url)
    command = [
        *(sys.executable, "-m", "sglang.test.few_shot_gsm8k"),
        *("--host", str(place.hostname), "--port", str(place.port)),
        *("--num-questions", str(args.questions)),
        *(("--data-path", str(args.data_path.resolve())) if args.data_path else ()),
    ]
    # It writes a file where it runs.
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    server.check_alive("while it answered GSM8K")
    return ran.stdout if ran.returncode == 0 else ran.stdout + ran.stderr
