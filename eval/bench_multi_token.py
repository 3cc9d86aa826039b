"""python -m eval.bench_multi_token: attention of several tokens a request, ours and SGLang's.

Workloads are written TREE:TOKENS: each request of the tree asks for its last TOKENS tokens,
causally, as a draft is verified or a chunk is prefilled. Every output is judged against fp64, first
and after it was timed; all are timed in turn by CUDA-graph replay over several KV pools (median,
cold L2).
"""

from __future__ import annotations

import sys
from typing import NamedTuple

from eval import provenance
from eval.bench_kernel.case import DTYPE, Case, build_case
from eval.bench_kernel.oracle import Oracle, some_rows
from eval.bench_kernel.providers.extend import PROVIDERS
from eval.bench_kernel.providers.provider import Provider, pick
from eval.bench_kernel.trees import Tree
from eval.bench_kernel.turns import take_turns
from eval.cli_values import benchmark, several
from sgl_prefix_attn.records import HeadConfig
from sgl_prefix_attn.tools.argument_types import count
from sgl_prefix_attn.tools.model_heads import parse_heads

# Verification and extension below a shared prefix, then both without sharing.
WORKLOADS = (
    "1,64_8192,260:4;1,128_6000,8:8;1,128_6000,16:16;1,128_6000,32:32;1,128_6000,120:120;"
    "64_2052:4;128_2056:8;32_2168:120;16_2560:512"
)


class Workload(NamedTuple):
    """Requests of a tree that ask for their last `tokens` tokens."""

    tree: Tree
    tokens: int

    @classmethod
    def parse(cls, text: str) -> Workload:
        """Raises ValueError for what is no TREE:TOKENS, or for more tokens than are private."""
        tree_text, colon, tokens_text = text.strip().rpartition(":")
        if not colon or not tokens_text.isdigit():
            raise ValueError(f"workload {text!r} must be TREE:TOKENS, such as 1,64_8192,260:4")
        workload = cls(Tree.parse(tree_text), int(tokens_text))
        if not 1 <= workload.tokens <= workload.tree.lengths[-1]:
            raise ValueError(
                f"workload {text!r}: tokens must be 1 to {workload.tree.lengths[-1]}, the length "
                "of the tree's leaves"
            )
        return workload

    @property
    def name(self) -> str:
        return f"{self.tree.name}:{self.tokens}"


def bench(workload: Workload, case: Case, providers: list[Provider]) -> list[dict]:
    """Return a row of each provider; a wrong or missing one has a status instead of a time."""
    heads = f"{case.heads.num_qo_heads}/{case.heads.num_kv_heads}"
    known = {"workload": workload.name, "heads": heads}
    of_case = case, Oracle(case, some_rows(case))
    return take_turns(
        providers, lambda p: known | {"provider": p.name}, lambda p: of_case, case.device
    )


def _text(row: dict, ours: float | None) -> str:
    """Write a row, with what it takes of ours."""
    text = row["status"]
    if "us" in row:
        text = f"{row['us']:9.1f} us" + (f"  {row['us'] / ours:5.2f} x" if ours else "")
    predicted = f"  (predicted {row['predicted_us']:.1f})" if "predicted_us" in row else ""
    return f"{row['workload']}, {row['heads']} heads  {row['provider']:15} {text}{predicted}"


def main(argv: list[str]) -> int:
    parser = benchmark("eval.bench_multi_token", __doc__)
    parser.add_argument("--workloads", default=WORKLOADS, help="TREE:TOKENS joined by ;")
    parser.add_argument("--heads", type=several(parse_heads), default="32/8", help="such as 64/8")
    parser.add_argument("--head-dim", type=count, default=128)
    parser.add_argument("--providers", default=",".join(PROVIDERS), help="joined by commas")
    args = parser.parse_args(argv)
    try:
        workloads = [Workload.parse(text) for text in args.workloads.split(";")]
        providers = pick(args.providers.split(","), PROVIDERS)
        configs = [HeadConfig(*sizes, args.head_dim) for sizes in args.heads]
    except ValueError as error:
        parser.error(str(error))
    meta = provenance.collect("eval.bench_multi_token", argv, device=str(args.device))
    rows: list[dict] = []
    for heads in configs:
        for workload in workloads:
            tree, tokens = workload
            case = build_case(tree, heads, 1, DTYPE, args.device, tokens=tokens)
            found = bench(workload, case, providers)
            del case  # gigabytes, before the next one is made
            rows += found
            ours = next((row.get("us") for row in found if row["provider"] == "prefix"), None)
            print("\n".join(_text(row, ours) for row in found), flush=True)
            provenance.save(args.json, meta, rows)
    return int(any(row["provider"] == "prefix" and row["status"] != "ok" for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
