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
    from sgl_prefix_attn.step.extend import ExtendPreparer

    prepare, pass_over = ExtendPreparer.prepare, ExtendPreparer.pass_over
    verified = [0]  # tokens a request of the last batch that was looked at to be verified
    counts: dict[int, Counter] = defaultdict(Counter)
    file = os.open(os.environ[ENV], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def count(key, decision):
        same = counts[key]
        same[f"{decision.variant}:{decision.reason}"] += 1
        if same.total() % _WRITE_EVERY == 0:
            # Over the same bytes, of which there are never fewer than before: a new file would cost
            # the engine ten times as long, and the engine beside it counts nothing.
            os.pwrite(file, json.dumps(counts).encode(), 0)

    def counting(self, batch, query_lens, against=None, verifies=False):
        step = prepare(self, batch, query_lens, against, verifies)
        if query_lens.min() == query_lens.max():
            count(int(query_lens[0]), step.decision)
        if verifies:
            verified[0] = int(query_lens[0])
        return step

    def counting_passed_over(self):
        decision = pass_over(self)
        if decision is not None:
            count(verified[0], decision)
        return decision

    ExtendPreparer.prepare, ExtendPreparer.pass_over = counting, counting_passed_over


def read(target: Path, tokens: int) -> dict[str, int]:
    """Read batches of so many tokens a request by "variant:reason"; {} where nothing counts."""
    text = target.read_text() if target.exists() else ""
    return json.loads(text or "{}").get(str(tokens), {})
