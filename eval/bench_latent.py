"""python -m eval.bench_latent: decode over latent KV (absorbed MLA), ours and SGLang's.

Every output is judged against fp64, first and after it was timed; all are timed in turn by
CUDA-graph replay over several KV pools (median, cold L2). FlashMLA runs at pages of 64 tokens, as
in SGLang, whatever the others do; PYTHONPATH may name a folder with it. The table at the end has
the best peer's time over ours; where a server would run stock kernels anyway, the lines below it
say that.
"""

from __future__ import annotations

import sys

from eval.bench_kernel.__main__ import SEED, run
from eval.bench_kernel.compare_providers import Setting
from eval.bench_kernel.providers.latent import PROVIDERS
from eval.bench_kernel.providers.provider import pick
from eval.bench_kernel.trees import parse_trees
from eval.cli_values import benchmark, several, told
from sgl_prefix_attn.records import HeadConfig
from sgl_prefix_attn.tools.argument_types import count

TREES = (
    "1,64_8192,256;1,64_32768,256;1,256_8192,256;1,16_8192,256;1,64_2048,256;1,64_8192,1024;"
    "1,4,64_2048,2048,256;64_4096"
)


def main(argv: list[str]) -> int:
    parser = benchmark("eval.bench_latent", __doc__)
    parser.add_argument("--trees", type=told(parse_trees), default=TREES, help="joined by ;")
    parser.add_argument(
        "--heads", type=several(count), default="16,8,32,64,128", help="query heads of a rank"
    )
    parser.add_argument("--dims", type=several(count), default="576,512", help="of rows, of values")
    parser.add_argument("--page-size", type=count, default=1)
    parser.add_argument("--providers", default=",".join(PROVIDERS), help="joined by commas")
    args = parser.parse_args(argv)
    if len(args.dims) != 2:
        parser.error("argument --dims: expected two, of rows and of values")
    try:
        providers = pick(args.providers.split(","), PROVIDERS)
        settings = [
            Setting(tree, HeadConfig(heads, 1, *args.dims), args.page_size, args.device, SEED)
            for heads in args.heads
            for tree in args.trees
        ]
    except ValueError as error:
        parser.error(str(error))
    return run("eval.bench_latent", argv, args, settings, providers)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
