"""SGLang plugin of the benchmark: host times, and the launches that an engine's name asks for.

Loaded into the engine only by eval.engine_process. `:in_order` behind a name starts the kernel of
row tiles behind the one before it; in a server it starts while that one ends.
"""

from __future__ import annotations

import os

from eval.bench_engine import host_times

IN_ORDER, ENV = ":in_order", "EVAL_LAUNCHES_IN_ORDER"


def register() -> None:
    host_times.register()
    if not os.environ.get(ENV):
        return
    from sgl_prefix_attn.execute.backends.gluon_backend import GluonBackend

    start = GluonBackend.__init__

    def in_order(self, *args, **kwargs):
        start(self, *args, **kwargs)
        self.pdl = False

    GluonBackend.__init__ = in_order
