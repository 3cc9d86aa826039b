"""SGLang plugin of the benchmark: host times, and the launches that an engine's name asks for.

Loaded into the engine only by eval.engine_process. `:ordered` behind a name starts every kernel
of row tiles when the one before it has ended, which a server leaves to the kernel itself.
"""

from __future__ import annotations

import os

from eval.bench_engine import host_times

ORDERED, ENV = ":ordered", "EVAL_ORDERED_LAUNCHES"


def register() -> None:
    host_times.register()
    if not os.environ.get(ENV):
        return
    from sgl_prefix_attn.execute.backends.gluon_backend import GluonBackend

    start = GluonBackend.__init__

    def ordered(self, *args, **kwargs):
        start(self, *args, **kwargs)
        self.pdl = False

    GluonBackend.__init__ = ordered
