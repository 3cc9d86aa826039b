"""Stand-ins for engines that stand side by side."""

from types import SimpleNamespace

from eval import dummy_engine


def fake_engines(monkeypatch, ask):
    """Engines that answer by ask(backend, op, **arguments); what each was started with, in order:
    backend, arguments of sglang.Engine, home, plugin and env."""
    started = []

    class Engine:
        start_s, plugins = 1.0, []

        def __init__(self, arguments, home, *, product, plugin, env):
            self.backend = home.name.replace("-", "/")
            started.append(SimpleNamespace(
                backend=self.backend, arguments=arguments, home=home, plugin=plugin, env=env,
                product=product,
            ))  # fmt: skip

        def wait_until_up(self):
            pass

        def ask(self, op, **arguments):
            return ask(self.backend, op, **arguments)

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(dummy_engine, "EngineProcess", Engine)
    return started
