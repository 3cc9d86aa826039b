"""One run of a program on a server: what the client's clock and the server's counters say of it."""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from eval.counters import STEPS, Counters, growth, total
from eval.server_process import ServerProcess

PROGRAMS = ("tool_agents", "tree_of_thought", "judge", "document_qa")
# Equal for every backend, or the programs were not the same.
COUNTS = ("requests", "prompt_tokens", "output_tokens")
_TOTALS = {
    "requests": "sglang:num_requests_total",
    "prompt_tokens": "sglang:prompt_tokens_total",
    "cached_tokens": "sglang:cached_tokens_total",
    "output_tokens": "sglang:generation_tokens_total",
}
_LATENCY = "sglang:inter_token_latency_seconds"


class ProgramError(RuntimeError):
    """A program failed: one sentence."""


def sizes(program: str, scale: int = 1) -> dict[str, int]:
    """Return a program's sizes, those in tokens divided by `scale`."""
    parameters = inspect.signature(_module(program).programs).parameters.values()
    known = {p.name: p.default for p in parameters if p.name not in ("count", "seed")}
    return {
        name: max(1, size // scale) if name.endswith("_tokens") else size
        for name, size in known.items()
    }


def run(
    server: ServerProcess, program: str, count: int, *, seed: int, scale: int,
    progress: bool = False,
) -> dict:  # fmt: skip
    """Run `count` instances of a program at once, greedy, from an empty radix cache.

    Returns `figures` of it. progress: show a bar. Raises ProgramError and ServerError."""
    import sglang as sgl

    run_batch = prepared(program, count, seed=seed, scale=scale)
    endpoint = sgl.RuntimeEndpoint(server.url, chat_template_name="default")
    server.flush_cache()
    before, start = server.counters(), time.perf_counter()
    try:
        with _no_collection():
            states = run_batch(
                temperature=0, ignore_eos=True, num_threads=count, progress_bar=progress,
                backend=endpoint,
            )  # fmt: skip
        seconds = time.perf_counter() - start
        errors = [state.error() for state in states if state.error() is not None]
        if errors:
            raise errors[0]
    except (KeyError, OSError, RuntimeError) as error:  # a request, or a result that is missing
        server.check_alive(f"while it ran {program}")
        raise ProgramError(f"{program} failed: {error!r}") from error
    return figures(growth(before, server.counters()), seconds)


def prepared(program: str, count: int, *, seed: int, scale: int) -> Callable[..., list]:
    """Return run_batch of `count` instances of a program, whose states it returns."""
    function, batch = _module(program).programs(count, seed=seed, **sizes(program, scale))
    return partial(function.run_batch, batch)


def figures(counters: Counters, seconds: float) -> dict:
    """Return a run's figures: `counters` grew by so much in `seconds`.

    tpot_ms is the mean over output tokens of the time that the server took for each, those of a
    request's first report left out; None where no request lived to a second report."""
    row: dict = {name: int(total(counters, metric)) for name, metric in _TOTALS.items()}
    timed = total(counters, f"{_LATENCY}_count")
    return {
        "wall_s": seconds, **row, "tokens_per_s": row["output_tokens"] / seconds,
        "tpot_ms": 1e3 * total(counters, f"{_LATENCY}_sum") / timed if timed else None,
        "cached_share": row["cached_tokens"] / row["prompt_tokens"],
        "prefix_steps": int(total(counters, STEPS, variant="prefix")),
        "stock_steps": int(total(counters, STEPS, variant="stock")),
    }  # fmt: skip


def unequal(rows: Iterable[dict]) -> list[str]:
    """Say which runs of a program made or read other numbers of tokens than its first."""
    first: dict[str, dict] = {}
    problems = []
    for row in rows:
        reference = first.setdefault(row["program"], row)
        problems += [
            f"{row['program']}: {row[name]} {name.replace('_', ' ')} with {row['backend']}, "
            f"{reference[name]} with {reference['backend']}"
            for name in COUNTS
            if row[name] != reference[name]
        ]
    return problems


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from ending a failed program's state while a thread starts: until
    Python 3.13 both take the same lock of `threading`, and the client would wait for itself."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _module(program: str):
    return importlib.import_module(f"eval.examples.{program}")
