"""python -m eval.bench_ttft: first tokens of batches whose prompts begin with cached prefixes.

PackInfer's case: requests that arrive together, groups of them below one cached prefix each, with a
few new tokens of mixed length. The time is that of a batch until the last of its requests has its
first token; engines with dummy weights stand side by side on one GPU and take turns.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

from eval.cli_values import add_engine_arguments, benchmark, less_more, several
from eval.dummy_engine import engine_arguments, in_turn, run_all, side_by_side
from eval.engine_process import EngineProcess
from eval.model_shapes import SHAPES, write_config
from sgl_prefix_attn.tools.argument_types import count

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
    parser = benchmark("eval.bench_ttft", __doc__, SHAPES, "fa3/prefix,prefix/prefix")
    parser.add_argument("--requests", type=count, default=128)
    parser.add_argument("--groups", type=several(count), default="16,32,64,128")
    parser.add_argument("--cached", type=less_more, default="4096,6144", help="LEAST,MOST")
    parser.add_argument("--new", type=less_more, default="4,16", help="LEAST,MOST")
    parser.add_argument("--batches", type=count, default=25)
    add_engine_arguments(parser)
    args = parser.parse_args(argv)
    return run_all("eval.bench_ttft", argv, args, [lambda folder, _: _run(folder, args)], _text)


def _text(row: dict) -> str:
    return (
        f"groups of {row['group']:<4} {row['backend']:<16} {row['ttft_ms']:8.1f} ms  "
        f"{row['ratio']:.3f}"
    )


def _run(folder: Path, args) -> Iterator[dict]:
    rounds = args.batches + _WARM_UP
    prefixes = -(-args.requests // min(args.groups))
    tokens = prefixes * (args.cached[1] + 1) + rounds * args.requests * (args.new[1] + 2)
    arguments = engine_arguments(
        write_config(folder / "model", args.model_shape), device=args.device, page_size=1,
        pool_tokens=tokens, decode_batches=[args.requests],
    ) | args.engine_arguments  # fmt: skip
    with side_by_side(args.backends, folder, arguments) as engines:
        for group in args.groups:
            yield from _times(engines, group, rounds, args)


def _times(engines: dict[str, EngineProcess], group: int, rounds: int, args) -> Iterator[dict]:
    vocab_size = SHAPES[args.model_shape]["vocab_size"]
    prompts = Prompts(args.requests, group, args.cached, args.new, vocab_size)
    for engine in engines.values():
        engine.ask("flush")  # the pool has room for the batches of one group
        engine.ask("time_batch", ids=prompts.prefixes, new_tokens=1)
    batches = [prompts.batch() for _ in range(rounds)]
    seconds: dict[str, list[float]] = {backend: [] for backend in engines}
    for i, backend in in_turn(engines, rounds):
        answer = engines[backend].ask("time_batch", ids=batches[i], new_tokens=1)
        if i >= _WARM_UP:
            seconds[backend].append(answer["seconds"])
    medians = {backend: statistics.median(of) for backend, of in seconds.items()}
    for backend, median in medians.items():
        yield {
            "backend": backend, "requests": args.requests, "group": group, "cached": args.cached,
            "new": args.new, "seconds": seconds[backend], "ttft_ms": median * 1e3,
            "ratio": median / medians[args.backends[0]],
        }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
