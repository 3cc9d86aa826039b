"""SGLang plugin of the benchmark: counts what was decided about verify batches.

Loaded into the engine only by eval.engine_process. A batch whose requests all ask for as many
tokens is counted under that number; the counts are written to $EVAL_VERIFY_STEPS.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from pathlib import Path

ENV = "EVAL_VERIFY_STEPS"
_WRITE_EVERY = 8  # batches; the engine is ended without notice


def register() -> None:
    target = os.environ.get(ENV)
    if not target:
        return
    from sgl_prefix_attn.step.extend import ExtendPreparer

    prepare, counts = ExtendPreparer.prepare, defaultdict(Counter)

    def counting(self, batch, query_lens, *against):
        step = prepare(self, batch, query_lens, *against)
        if query_lens.min() == query_lens.max():
            same = counts[int(query_lens[0])]
            same[f"{step.decision.variant}:{step.decision.reason}"] += 1
            if same.total() % _WRITE_EVERY == 0:
                part = Path(target).with_suffix(".part")
                part.write_text(json.dumps(counts))
                part.replace(target)
        return step

    ExtendPreparer.prepare = counting


def read(target: Path, tokens: int) -> dict[str, int]:
    """Read batches of so many tokens a request by "variant:reason"; {} where nothing counts."""
    return json.loads(target.read_text()).get(str(tokens), {}) if target.exists() else {}


def prefix_share(steps: dict[str, int]) -> float | None:
    """Share of batches that ran a plan; None where nothing was counted."""
    ours = sum(count for key, count in steps.items() if key.startswith("prefix:"))
    return ours / sum(steps.values()) if steps else None
