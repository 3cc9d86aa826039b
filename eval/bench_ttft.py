"""python -m eval.bench_ttft: first tokens of batches whose prompts begin with cached prefixes.

PackInfer's case: requests that arrive together, groups of them below one cached prefix each, with a
few new tokens of mixed length. The time is that of a batch until the last of its requests has its
first token; engines with dummy weights stand side by side on one GPU and take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import sys
import tempfile
from pathlib import Path

from eval import provenance
from eval.cli_values import device, output, several
from eval.dummy_engine import engine_arguments, in_turn, start, wait_until_up
from eval.engine_process import EngineError, end_on_sigterm, folder_name
from eval.model_shapes import SHAPES, write_config
from sgl_prefix_attn.cli.argument_types import count

_WARM_UP = 2  # batches before those that count: kernels compile, graphs are captured


class Prompts:
    """Prompts of `requests` in groups of `group` below one prefix each, the same in every run.

    cached, new  shortest and longest prefix, and shortest and longest rest, in tokens
    """

    def __init__(self, requests: int, group: int, cached, new, vocab_size: int):
        self._rng = random.Random(f"{requests}/{group}")
        self._tokens = range(vocab_size // 8, vocab_size)
        self._new = new
        self.prefixes = [self._draw(cached) for _ in range(-(-requests // group))]
        self._prefix_of = [self.prefixes[i // group] for i in range(requests)]

    def batch(self) -> list[list[int]]:
        """Draw another batch: of its prompts nothing but the prefixes is cached."""
        return [prefix + self._draw(self._new) for prefix in self._prefix_of]

    def _draw(self, bounds) -> list[int]:
        return self._rng.choices(self._tokens, k=self._rng.randint(*bounds))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.bench_ttft", description=__doc__)
    parser.add_argument("--model-shape", default="llama3.1-8b", choices=list(SHAPES))
    parser.add_argument(
        "--backends", default="fa3/prefix,prefix/prefix", help="PREFILL/DECODE; the first: baseline"
    )
    parser.add_argument("--requests", type=count, default=128)
    parser.add_argument("--groups", type=several(count), default="16,32,64,128")
    parser.add_argument("--cached", type=several(count), default="4096,6144", help="LEAST,MOST")
    parser.add_argument("--new", type=several(count), default="4,16", help="LEAST,MOST")
    parser.add_argument("--batches", type=count, default=25)
    parser.add_argument("--device", type=device, default="cuda")
    parser.add_argument("--json", type=output, metavar="OUT")
    args = parser.parse_args(argv)
    for name in ("cached", "new"):
        bounds = getattr(args, name)
        if len(bounds) != 2 or bounds[0] > bounds[1]:
            parser.error(f"argument --{name}: expected LEAST,MOST")
    end_on_sigterm()
    meta = provenance.collect("eval.bench_ttft", argv, model_shape=args.model_shape)
    with tempfile.TemporaryDirectory(prefix="bench-ttft-") as folder, contextlib.ExitStack() as s:
        try:
            rows = _run(Path(folder), s, args)
        except EngineError as error:
            print(error, file=sys.stderr)
            return 1
    if args.json:
        provenance.save(args.json, meta, rows)
    return 0


def _run(folder: Path, stack: contextlib.ExitStack, args) -> list[dict]:
    model = write_config(folder / "model", args.model_shape)
    rounds = args.batches + _WARM_UP
    prefixes = -(-args.requests // min(args.groups))
    arguments = engine_arguments(
        model,
        device=args.device,
        page_size=1,
        pool_tokens=prefixes * (args.cached[1] + 1) + rounds * args.requests * (args.new[1] + 2),
        decode_batches=[args.requests],
    )
    backends = list(dict.fromkeys(args.backends.split(",")))
    engines = {
        backend: start(stack, backend, folder / folder_name(backend), arguments)
        for backend in backends
    }
    wait_until_up(engines)
    rows = []
    for group in args.groups:
        vocab_size = SHAPES[args.model_shape]["vocab_size"]
        prompts = Prompts(args.requests, group, args.cached, args.new, vocab_size)
        for engine in engines.values():
            engine.ask("flush")  # the pool has room for the batches of one group
            engine.ask("time_batch", ids=prompts.prefixes, new_tokens=1)
        batches = [prompts.batch() for _ in range(rounds)]
        seconds: dict[str, list[float]] = {backend: [] for backend in backends}
        for i, backend in in_turn(backends, rounds):
            answer = engines[backend].ask("time_batch", ids=batches[i], new_tokens=1)
            if i >= _WARM_UP:
                seconds[backend].append(answer["seconds"])
        base = statistics.median(seconds[backends[0]])
        for backend in backends:
            median = statistics.median(seconds[backend])
            rows.append(
                {
                    "backend": backend, "requests": args.requests, "group": group,
                    "cached": args.cached, "new": args.new, "seconds": seconds[backend],
                    "ttft_ms": median * 1e3, "ratio": median / base,
                }
            )  # fmt: skip
            print(
                f"groups of {group:<4} {backend:<16} {median * 1e3:8.1f} ms  {median / base:.3f}",
                flush=True,
            )
    return rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
