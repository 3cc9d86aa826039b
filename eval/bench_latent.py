"""python -m eval.bench_latent: decode over latent KV (absorbed MLA), ours and SGLang's.

Every output is judged against fp64, first and after it was timed; all are timed in turn by
CUDA-graph replay over several KV pools (median, cold L2). FlashMLA runs at pages of 64 tokens, as
in SGLang, whatever the others do; PYTHONPATH may name a folder with it. The last lines say what
part of the best peer's time ours takes; where a server would run stock kernels anyway, they say
that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict

from eval import provenance
from eval.bench_kernel import over_floor
from eval.bench_kernel.compare_providers import Setting, compare
from eval.bench_kernel.floor import rates_of
from eval.bench_kernel.providers.latent import PROVIDERS
from eval.bench_kernel.trees import parse_trees
from eval.cli_values import benchmark, several
from sgl_prefix_attn.records import HeadConfig
from sgl_prefix_attn.tools.argument_types import count

_SEED = 0
TREES = (
    "1,64_8192,256;1,64_32768,256;1,256_8192,256;1,16_8192,256;1,64_2048,256;1,64_8192,1024;"
    "1,4,64_2048,2048,256;64_4096"
)


def main(argv: list[str]) -> int:
    parser = benchmark("eval.bench_latent", __doc__)
    parser.add_argument("--trees", type=parse_trees, default=TREES, help="joined by ;")
    parser.add_argument(
        "--heads", type=several(count), default="16,8,32,64,128", help="query heads of a rank"
    )
    parser.add_argument("--dims", type=several(count), default="576,512", help="of rows, of values")
    parser.add_argument("--page-size", type=count, default=1)
    parser.add_argument("--providers", default=",".join(PROVIDERS), help="joined by commas")
    args = parser.parse_args(argv)
    names = args.providers.split(",")
    if unknown := sorted(set(names) - set(PROVIDERS)):
        parser.error(f"provider {unknown[0]!r}: known are {', '.join(PROVIDERS)}")
    providers, rates = [PROVIDERS[name]() for name in names], rates_of(args.device)
    meta = provenance.collect(
        "eval.bench_latent", argv, device=str(args.device), seed=_SEED, rates=asdict(rates)
    )
    rows: list[dict] = []
    for heads in args.heads:
        for tree in args.trees:
            config = HeadConfig(heads, 1, *args.dims)
            setting = Setting(tree, config, args.page_size, args.device, _SEED)
            print(f"\n{tree.name}, {heads} heads", flush=True)
            found = {row["provider"]: row for row in compare(setting, providers, rates)}
            for row in found.values():
                print(over_floor.text_row(found, row), flush=True)
            rows += found.values()
            if args.json:
                provenance.save(args.json, meta, rows)
    print("\n" + "\n".join(beside_the_best(rows)))
    ours = [row["status"] for row in rows if row["provider"] == "prefix"]
    return int(any(not status.startswith(("ok", "unsupported")) for status in ours))


def beside_the_best(rows: list[dict]) -> Iterator[str]:
    """Say of each tree and number of heads what part of the best peer's time ours takes."""
    for (heads, *_), trees in over_floor.group(rows).items():
        for tree, found in trees.items():
            peers = [x for x in found.values() if x["provider"] != "prefix" and x["status"] == "ok"]
            best, ours = min(peers, key=lambda row: row["us"], default=None), found.get("prefix")
            says = "no peer ran"
            if best is not None:
                says = f"{best['provider']} {best['us']:.1f} us"
            if ours is not None and ours["status"] != "ok":
                says += f", prefix {ours['status']}"
            elif ours is not None and best is not None:
                says += f", prefix {ours['us'] / best['us']:.2f} of it"
            yield f"{heads.partition('/')[0]:>4} heads  {tree:<22} {says}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
