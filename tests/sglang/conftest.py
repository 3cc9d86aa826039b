"""Session-wide engine runs: each (configuration, backend) is started once, both side by side."""

import pytest

from eval.tiny_model import write_tiny_llama
from tests.sglang.engine import PREFIX, STOCK, Config, Run, finish, run_together, start


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


class Engines:
    def __init__(self, model, folder):
        self.model, self.folder, self.runs = model, folder, {}

    def runs_of(self, config: Config, *backends: str) -> list[Run]:
        """One Run for each backend, started together when they have not run yet."""
        new = {b: (config, b) for b in backends if (config.name, b) not in self.runs}
        for backend, run in run_together(new, self.model, self.folder / config.name).items():
            self.runs[config.name, backend] = run
        return [self.runs[config.name, b] for b in backends]

    def both(self, config: Config) -> tuple[Run, Run]:
        """(stock, prefix)"""
        return tuple(self.runs_of(config, STOCK, PREFIX))

    def failing(self, config: Config) -> str:
        """The log of a prefix engine that must not start."""
        folder = self.folder / config.name / PREFIX
        return finish(start(config, PREFIX, self.model, folder), folder, expect_failure=True).log


@pytest.fixture(scope="session")
def engines(model, tmp_path_factory):
    return Engines(model, tmp_path_factory.mktemp("engines"))
