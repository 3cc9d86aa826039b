"""All loads on the server of one backend: warmed up, emptied, sent, counted."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate

from eval import provenance
from eval.bench_serving import rates, serving_row
from eval.bench_serving.client import Client, ClientError
from eval.bench_serving.rates import Rate
from eval.counters import growth
from eval.dummy_engine import in_turn
from eval.engine_process import folder_name
from eval.server_process import ServerError, ServerProcess, fetch
from eval.workloads.load import Load, prompts

# Of a warm-up: at most so many requests and, but for the first, prompt tokens; tokens generated.
_REQUESTS, _PROMPT_TOKENS, _NEW_TOKENS = 32, 65536, 16


def save_in_turn(
    args, meta: dict, wanted: int, serve: Callable[[int, str, list[dict]], Iterator[dict]]
) -> int:
    """Serve with each backend in turn, save all rows whenever one comes, and return the exit
    status: 1 where fewer came than are wanted of each.

    args   backends, alternations, and json, the result file
    serve  yields the rows of a turn's number and backend, given those before; may raise ServerError
    """
    rows: list[dict] = []
    turns = list(in_turn(args.backends, args.alternations))
    runs = len(turns) * wanted
    print(f"{runs} runs", flush=True)
    for turn, backend in turns:
        try:
            for row in serve(turn, backend, rows):
                rows.append(row)
                provenance.save(args.json, meta, rows)
        except ServerError as error:
            print(f"{backend} stopped: {error}", file=sys.stderr, flush=True)
    if missing := runs - len(rows):
        print(f"{missing} of {runs} runs failed or were left out", file=sys.stderr)
    return int(missing > 0)


@dataclass(frozen=True)
class Run:
    """One load at one rate on the server of one backend, the alternation-th time."""

    backend: str
    alternation: int
    load: Load
    rate: Rate

    def __str__(self) -> str:
        return f"{self.backend}, {self.load.name} at {self.rate.label}"


def measure(
    runs: list[Run], server: ServerProcess, client: Client, before: list[dict], baseline: str
) -> Iterator[dict]:
    """Yield the row of each run on a healthy server, and print what is going on.

    before    all rows so far, these included: shares are of what the baseline served

    A share of an unknown saturation, and what the client fails at, is left out and told. Raises
    ServerError.
    """
    for number, run in enumerate(runs, 1):
        print(f"{run} ({number} of {len(runs)}) ...", flush=True)
        try:
            rate = run.rate.resolve(rates.saturation(before, run.load.name, baseline))
            warm_up(run.load, server, client)
            found = serve(run, rate, server, client)
        except (ValueError, ClientError) as error:
            print(f"  left out: {error}", flush=True)
            continue
        print(f"  {serving_row.text(found)}", flush=True)
        yield {
            "backend": run.backend, "load": run.load.name, "rate": run.rate.label,
            "asked_requests_per_s": rate if math.isfinite(rate) else None,
            "alternation": run.alternation, **found,
        }  # fmt: skip


def serve(run: Run, rate: float, server: ServerProcess, client: Client) -> dict:
    """Return the figures of one run at so many requests/s, from an empty cache. Raises ClientError
    and ServerError."""
    server.flush_cache()
    before, cpu = server.counters(), server.cpu_seconds()
    server.new_log()
    name = f"{folder_name(run.backend)}-{run.load.name}-{run.rate.label}-{run.alternation}"
    report = client.run(name.replace(":", "-"), server, run.load, rate, run.rate.streams)
    wanted = [request.output for request in run.load.requests]
    grown = growth(before, server.counters())
    taken = server.cpu_seconds() - cpu
    row = serving_row.row(report, wanted, grown, server.new_log(), taken)
    return row if run.rate.streams else row | dict.fromkeys(serving_row.OF_STREAMS)


def warm_up(load: Load, server: ServerProcess, client: Client) -> None:
    """Send the first requests of such a load at once, with short answers. Raises ServerError."""
    sums = accumulate(request.input for request in load.requests[:_REQUESTS])
    number = max(1, sum(tokens <= _PROMPT_TOKENS for tokens in sums))
    ids = prompts(load.requests[:number], client.seed, client.vocab_size)

    def send(prompt: list[int]) -> None:
        sampling = {"max_new_tokens": _NEW_TOKENS, "ignore_eos": True, "temperature": 0}
        body = {"input_ids": prompt, "sampling_params": sampling}
        fetch(f"{server.url}/generate", body=body, limit_s=600)

    try:
        with ThreadPoolExecutor(_REQUESTS) as senders:
            list(senders.map(send, ids))
    except OSError as error:
        server.check_alive(f"while {load.name} was warmed up")
        raise server.error(f"did not answer while {load.name} was warmed up: {error}") from None
