"""python -m eval.bench_kernel: decode attention of every provider on prefix trees.

A provider whose output differs from the oracle is shown as wrong and has no time; one that is not
installed is a line that says so. All are timed in turn, several rounds long.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

from eval import provenance
from eval.bench_kernel import bars, kernel_tables, over_floor
from eval.bench_kernel.case import DTYPES
from eval.bench_kernel.compare_providers import DeviceLost, Setting, compare
from eval.bench_kernel.floor import rates_of
from eval.bench_kernel.providers import STRATEGIES, make_providers
from eval.bench_kernel.trees import LAYOUTS, parse_trees
from eval.cli_values import device, output, several
from sgl_prefix_attn.cli.argument_types import count
from sgl_prefix_attn.cli.model_heads import parse_heads
from sgl_prefix_attn.records import HeadConfig

_PEERS = "prefix,flashinfer,fa3,batchattn,cascade"


def main(argv: list[str]) -> int:
    args, settings, providers = _parse(argv)
    rates = rates_of(args.device)
    meta = provenance.collect(
        "eval.bench_kernel", argv, device=str(args.device), seed=args.seed, rates=asdict(rates)
    )
    paths = {"fasttree": args.fasttree_path, "pat": args.pat_path}
    meta["peers"] = {
        provider.name: provenance.sources(paths[provider.name])
        for provider in providers
        if paths.get(provider.name)
    }
    print(
        f"{meta['gpu'] or meta['machine']}: floor at {rates.bandwidth / 1e12:.2f} TB/s and "
        f"{rates.flops / 1e12:.0f} TFLOP/s ({rates.source})"
    )
    reasons = {}
    for provider in providers:
        reason = provider.available()
        if reason is not None:
            reasons[provider.name] = reason
            print(f"{provider.name} is not available: {reason}")
    rows: list[dict] = []
    try:
        for setting in settings:
            _run_setting(setting, providers, rates, reasons, rows)
            if args.json:
                provenance.save(args.json, meta, rows)
    except DeviceLost as error:
        print(f"stopped, the GPU context is lost: {error}", file=sys.stderr)
        if args.json and rows:
            provenance.save(args.json, meta, rows, incomplete=str(error))
        return 2
    print("\n" + kernel_tables.markdown(rows))
    if args.plot:
        bars.write(rows, args.plot)
    wrong = [r for r in rows if over_floor.is_ours(r["provider"]) and r["status"] != "ok"]
    wrong = [r for r in wrong if not r["status"].startswith("unsupported")]
    return 1 if wrong else 0


def _run_setting(setting: Setting, providers, rates, reasons, rows: list[dict]) -> None:
    heads = f"{setting.heads.num_qo_heads}/{setting.heads.num_kv_heads}"
    print(
        f"\n{setting.tree.name}: {setting.tree.batch_size} requests of {setting.tree.seq_len}, "
        f"{heads} heads, page size {setting.page_size}",
        flush=True,
    )
    entry: dict[str, dict] = {}
    try:
        for row in compare(setting, providers, rates, reasons):
            entry[row.provider] = asdict(row)
            rows.append(entry[row.provider])
    finally:
        for row in entry.values():
            print(over_floor.text_row(entry, row), flush=True)


def _parse(argv: list[str]):
    parser = argparse.ArgumentParser(prog="python -m eval.bench_kernel", description=__doc__)
    parser.add_argument("--trees", default="pat20", help="pat20, or trees joined by ;")
    parser.add_argument("--heads", default="32/8", help="QO/KV heads, such as 32/8,64/8")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument(
        "--providers",
        default=_PEERS,
        help="fasttree, pat, torch, prefix:triton and prefix:row_tiles, too, and prefix:STRATEGY, "
        f"of {', '.join(STRATEGIES)}",
    )
    parser.add_argument("--page-size", type=several(count), default="1", help="such as 1,16,64")
    parser.add_argument("--dtype", default="bf16", choices=list(DTYPES))
    parser.add_argument("--layout", default="permuted", choices=LAYOUTS, help="of KV in the pool")
    parser.add_argument("--device", type=device, default="cuda", help="cpu: small trees only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--json", type=output, metavar="OUT", help="result file, written after every tree"
    )
    parser.add_argument("--plot", type=output, metavar="OUT.png")
    parser.add_argument("--fasttree-path", metavar="DIR", help="checkout of FastTree-Artifact")
    parser.add_argument("--pat-path", metavar="DIR", help="built checkout of PAT")
    args = parser.parse_args(argv)
    try:
        names = args.providers.split(",")
        providers = make_providers(names, args.fasttree_path, args.pat_path)
        settings = [
            Setting(
                tree,
                HeadConfig(*parse_heads(heads.strip()), args.head_dim),
                page,
                args.dtype,
                DTYPES[args.dtype],
                args.device,
                args.seed,
                args.layout,
            )
            for heads in args.heads.split(",")
            for page in args.page_size
            for tree in parse_trees(args.trees)
        ]
    except ValueError as error:
        parser.error(str(error))
    return args, settings, providers


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
