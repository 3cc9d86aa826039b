"""python -m eval.row_tile_fit: one time model of row tiles for a GPU, with heads as its inputs.

`sample` times cuts of random batches on this GPU for several head configurations and adds them to a
file. `fit` reads it on any machine, prints the rates of plan/row_tile_time.py that describe all of
it best, and how a fit to all head configurations but one does on that one: the time of the cuts
that it chooses over the best measured. Up to 1.02, one file per GPU is enough. Of a single head
configuration, a fifth of the batches is left out in turn. `picks` says the same of the cuts that
the planner's own search finds with today's rates, and `trees` how near these come to what
eval.bench_kernel measured.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from eval import provenance
from eval.cli_values import amount, gpu, output, several
from eval.row_tile_fit import fitting, measure, picks, samples, tree_times
from sgl_prefix_attn.calibrate.batches import draw
from sgl_prefix_attn.cli.model_heads import parse_heads
from sgl_prefix_attn.plan.costs import GPU_RATES, known_rates
from sgl_prefix_attn.plan.row_tile_time import RowTileRates
from sgl_prefix_attn.predict.row_tile_rates import rates_of_gpu
from sgl_prefix_attn.records import HeadConfig

_HEADS = "32/8,16/4,8/2,8/1,64/8,32/4,28/4,40/8"
ENOUGH = 1.02


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.row_tile_fit", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    take = commands.add_parser("sample", help="on a Hopper GPU")
    take.add_argument(
        "--heads", type=several(parse_heads), default=_HEADS, help=f"default {_HEADS}"
    )
    take.add_argument("--head-dim", type=int, default=128, help="(128) of all of them")
    take.add_argument("--seconds", type=amount, default=50.0, help="of timing, for all heads")
    take.add_argument("--seed", type=int, default=201)
    take.add_argument("--jsonl", type=Path, required=True, metavar="FILE")
    make = commands.add_parser("fit", help="on any machine")
    make.add_argument("--jsonl", type=Path, required=True, metavar="FILE")
    make.add_argument(
        "--json", type=output, metavar="OUT", help="result file: rates and judgements"
    )
    search = commands.add_parser("picks", help="on any machine")
    search.add_argument("--jsonl", type=Path, required=True, metavar="FILE")
    near = commands.add_parser("trees", help="on any machine")
    near.add_argument("results", nargs="+", metavar="JSON", help="of eval.bench_kernel")
    near.add_argument("--provider", default="prefix", help="that ran row tiles there (prefix)")
    args = parser.parse_args(argv)
    try:
        if args.command == "sample":
            return _sample(args)
        if args.command == "trees":
            return _trees(args)
        if args.command == "picks":
            return _picks(samples.read(args.jsonl))
        return _fit(samples.read(args.jsonl), args.json, argv)
    except (OSError, ValueError) as error:
        parser.error(str(error))


def _sample(args) -> int:
    device = gpu()
    name = torch.cuda.get_device_name(device)
    all_heads = [HeadConfig(*heads, args.head_dim) for heads in args.heads]
    print(f"compiling for {len(all_heads)} head configurations", flush=True)
    measure.compile_all(all_heads, name)
    # the same for all of them
    drawn = draw(args.seed, measure.MOST_BATCHES, measure.POOL_TOKENS)
    batches = {f"{args.seed}:{i}": batch for i, batch in enumerate(drawn)}
    for heads in all_heads:
        seconds = args.seconds / len(all_heads)
        found = list(measure.sample(heads, batches, seconds, device, name))
        samples.write(args.jsonl, found)
        met = len({sample.batch for sample in found})
        print(f"{heads}: {len(found)} cuts of {met} batches", flush=True)
        torch.cuda.empty_cache()
    return 0


def _fit(found: list[samples.Sample], path: str | None, argv: list[str]) -> int:
    gpu, head_dim = _one_gpu(found)
    today = _todays_rates(gpu, head_dim)
    rates = fitting.fit(found, today)
    left_out = fitting.leave_one_out(found, today)
    rows = []
    for one, mine in zip(left_out, fitting.parts(found).values(), strict=True):
        rows.append(asdict(one))
        for name, judged in (
            ("left out", one),
            ("all", fitting.judge(one.heads, mine, rates)),
            ("today's", fitting.judge(one.heads, mine, today)),
        ):
            rows[-1] |= {f"regret of {name}": judged.regret, f"error of {name}": judged.error}
            print(
                f"{one.heads:14} {name:8}  error {judged.error:5.3f}  regret {judged.regret:.4f}, "
                f"worst {judged.worst:.2f}  ({judged.batches} batches)"
            )
    for name, value in vars(rates).items():
        print(f"    {name}: float = {value:.4g}")
    worst = max(one.regret for one in left_out)
    print(f"largest regret of a part left out: {worst:.4f}; enough is {ENOUGH}")
    if path:
        meta = provenance.collect("eval.row_tile_fit", argv, sampled_on=gpu)
        provenance.save(path, meta, rows, rates=vars(rates))
    return 0 if worst <= ENOUGH else 1


def _picks(found: list[samples.Sample]) -> int:
    gpu, head_dim = _one_gpu(found)
    for one in picks.picks(found, _todays_rates(gpu, head_dim)):
        print(
            f"{one.heads:6} picked over fastest {one.mean:.4f}, worst {one.worst:.2f}  "
            f"({one.timed} of {one.batches} batches have a time of what is picked)"
        )
    return 0


def _one_gpu(found: list[samples.Sample]) -> tuple[str, int]:
    """The GPU and head dim of samples; ValueError where there are several."""
    gpus = {sample.gpu for sample in found}
    if len(gpus) > 1:
        raise ValueError(f"--jsonl: samples of several GPUs, {', '.join(sorted(gpus))}")
    head_dims = {sample.head_dim for sample in found}
    if len(head_dims) > 1:
        raise ValueError(f"--jsonl: samples of several head dims, {sorted(head_dims)}")
    return gpus.pop(), head_dims.pop()


def _todays_rates(gpu: str, head_dim: int) -> RowTileRates:
    bandwidth = (known_rates(gpu) or GPU_RATES["H100"]).bandwidth
    return rates_of_gpu(gpu, bandwidth, head_dim)


def _trees(args) -> int:
    results = map(provenance.load, args.results)
    print(
        tree_times.text([t for one in results for t in tree_times.tree_times(one, args.provider)])
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
