"""The generated tables of the pages: what `<!-- table: NAME -->` and `<!-- end -->` enclose."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from eval import provenance
from eval.pages import decisions, engines, kernels, routers, servers

PAGES = (
    "README.md", "docs/measurements.md", "docs/calibration.md", "eval/results/README.md",
    "eval/results/engines.md", "eval/results/kernels.md", "eval/results/papers.md",
    "eval/results/servers.md",
)  # fmt: skip
_TABLES: tuple[Callable[[], str], ...] = (
    servers.readme, servers.loads, servers.rates, routers.routing, servers.agents, servers.starts,
    engines.token_times, engines.kinds, engines.speculative, engines.first_tokens,
    engines.host_time, engines.outputs, engines.logprobs, engines.real_text,
    kernels.over_the_floor, kernels.by_tree, kernels.long_contexts, kernels.other_heads,
    kernels.narrow_kv, kernels.latent, kernels.invariant, kernels.ablations,
    kernels.several_tokens, decisions.policy, decisions.against_fa3, decisions.row_tile_rates,
    decisions.experiments, decisions.index,
)  # fmt: skip
TABLES = {table.__name__: table for table in _TABLES}
BLOCK = re.compile(r"<!-- table: (\w+) -->\n(.*?)<!-- end -->", re.DOTALL)


def fill(text: str) -> str:
    """Replace each block of a page by its table. Raises ValueError naming an unknown table."""

    def table(match: re.Match) -> str:
        name = match[1]
        if name not in TABLES:
            raise ValueError(f"table {name!r}: known are {', '.join(TABLES)}")
        return f"<!-- table: {name} -->\n{TABLES[name]()}\n<!-- end -->"

    return BLOCK.sub(table, text)


def stale(root: Path = provenance.ROOT) -> list[tuple[Path, str]]:
    """Return the pages that say anything else than the result files, with what they should say."""
    pages = [root / name for name in PAGES]
    return [(page, new) for page in pages if (new := fill(page.read_text())) != page.read_text()]
