"""python -m eval.bench_kernel: decode attention of every provider on prefix trees.

A provider whose output differs from the oracle is shown as wrong and has no time; one that is not
installed is a line that says so. All are timed in turn, several rounds long.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

import torch

from eval import provenance
from eval.bench_kernel import kernel_tables, over_floor
from eval.bench_kernel.compare_providers import DTYPE_NAMES, Setting, compare
from eval.bench_kernel.floor import rates_of
from eval.bench_kernel.providers import STRATEGIES, make_providers
from eval.bench_kernel.providers.other_cuts import CUTS
from eval.bench_kernel.providers.provider import Provider
from eval.bench_kernel.trees import parse_trees
from eval.cli_values import benchmark, several
from sgl_prefix_attn.records import HeadConfig
from sgl_prefix_attn.tools.argument_types import count
from sgl_prefix_attn.tools.model_heads import parse_heads

SEED = 0
_PEERS = "prefix,flashinfer,fa3,batchattn,cascade"


def main(argv: list[str]) -> int:
    args, settings, providers = _parse(argv)
    folders = {"fasttree": args.fasttree_path, "pat": args.pat_path}
    peers = {
        provider.name: provenance.sources(folders[provider.name])
        for provider in providers
        if folders.get(provider.name)
    }
    return run("eval.bench_kernel", argv, args, settings, providers, peers=peers)


def run(
    module: str, argv: list[str], args: argparse.Namespace, settings: list[Setting],
    providers: list[Provider], **meta,
) -> int:  # fmt: skip
    """Run a command's settings one by one, print and write their rows and a table. Returns 1 where
    something of ours is wrong, else 0."""
    rates = rates_of(args.device)
    meta |= {"device": str(args.device), "seed": SEED, "rates": asdict(rates)}
    meta = provenance.collect(module, argv, **meta)
    print(
        f"{meta['gpu'] or meta['machine']}: floor at {rates.bandwidth / 1e12:.2f} TB/s and "
        f"{rates.flops / 1e12:.0f} TFLOP/s ({rates.source})"
    )
    rows: list[dict] = []
    for setting in settings:
        heads = f"{setting.heads.num_qo_heads}/{setting.heads.num_kv_heads}"
        print(
            f"\n{setting.tree.name}: {setting.tree.batch_size} requests of "
            f"{setting.tree.seq_len}, {heads} heads, page size {setting.page_size}",
            flush=True,
        )
        found = {row["provider"]: row for row in compare(setting, providers, rates)}
        print("\n".join(over_floor.text_row(found, row) for row in found.values()), flush=True)
        rows += found.values()
        provenance.save(args.json, meta, rows)
    print("\n" + kernel_tables.markdown(rows))
    ours = [row["status"] for row in rows if over_floor.is_ours(row["provider"])]
    return int(any(not status.startswith(("ok", "unsupported")) for status in ours))


def _kv_dtype(text: str) -> torch.dtype:
    for dtype, name in DTYPE_NAMES.items():
        if name == text:
            return dtype
    raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(DTYPE_NAMES.values())}")


def _parse(argv: list[str]):
    parser = benchmark("eval.bench_kernel", __doc__)
    parser.add_argument("--trees", default="pat20", help="pat20, or trees joined by ;")
    parser.add_argument("--heads", default="32/8", help="QO/KV heads, such as 32/8,64/8")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument(
        "--providers",
        default=_PEERS,
        help="fasttree, pat, prefix:hopper and prefix:portable, too; the portable kernel by "
        f"another strategy, prefix:STRATEGY of {', '.join(STRATEGIES)}, or with no node split off, "
        f"prefix:merged; plans by another cut, prefix:CUT of {', '.join(CUTS)}; for deterministic "
        "inference, prefix:invariant and fa3:one_split; a plan that has grown, prefix:grown",
    )
    parser.add_argument(
        "--kv-dtype", type=several(_kv_dtype), default="bf16", help="bf16, fp8_e4m3, or both"
    )
    parser.add_argument("--page-size", type=several(count), default="1", help="such as 1,16,64")
    parser.add_argument(
        "--behind-products", action="store_true",
        help="time each layer as in a model, behind its products, by the profiler",
    )  # fmt: skip
    parser.add_argument("--fasttree-path", metavar="DIR", help="checkout of FastTree-Artifact")
    parser.add_argument("--pat-path", metavar="DIR", help="built checkout of PAT")
    args = parser.parse_args(argv)
    if args.behind_products and args.device.type == "cpu":
        parser.error("--behind-products needs a GPU, whose kernels its profiler times")
    try:
        names = args.providers.split(",")
        providers = make_providers(names, args.fasttree_path, args.pat_path)
        pairs = [parse_heads(text.strip()) for text in args.heads.split(",")]
        settings = [
            Setting(
                tree, HeadConfig(*pair, args.head_dim), page, args.device, SEED, kv_dtype,
                args.behind_products,
            )
            for pair in pairs
            for kv_dtype in args.kv_dtype
            for page in args.page_size
            for tree in parse_trees(args.trees)
        ]  # fmt: skip
    except ValueError as error:
        parser.error(str(error))
    return args, settings, providers


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
