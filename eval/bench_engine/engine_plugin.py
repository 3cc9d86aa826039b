"""SGLang plugin of the benchmark: host times, and the launches that an engine's name asks for.

Loaded into the engine only by eval.engine_process. `:dependent` behind a name starts the kernel of
row tiles while the one before it ends; in a server it starts behind it.
"""

from __future__ import annotations

import os

from eval.bench_engine import host_times

DEPENDENT, ENV = ":dependent", "EVAL_DEPENDENT_LAUNCHES"


def register() -> None:
    host_times.register()
    if not os.environ.get(ENV):
        return
    from sgl_prefix_attn.execute.backends.gluon_backend import GluonBackend

    start = GluonBackend.__init__

    def dependent(self, *args, **kwargs):
        start(self, *args, **kwargs)
        self.pdl = True

    GluonBackend.__init__ = dependent
