"""Engine runs of the whole suite: each (configuration, backend) is started once."""

import os

import pytest
from filelock import FileLock

from eval.tiny_model import write_tiny_llama
from sgl_prefix_attn.execute.backends.torch_row_tiles import TorchRowTiles
from tests.sglang.engine import PREFIX, Config, Run, result, run
from tests.support.torch_row_tiles import say_that_row_tiles_run


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


class Engines:
    """Processes of pytest-xdist share a folder: who comes second waits for the first one's run."""

    def __init__(self, model, folder):
        self.model, self.folder, self.runs = model, folder, {}

    def run(self, config: Config, backend: str = PREFIX) -> Run:
        if (config.name, backend) not in self.runs:
            folder = self.folder / config.name / backend
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{folder}.lock"):
                if not folder.exists():
                    run(config, backend, self.model, folder)
            self.runs[config.name, backend] = result(folder)
        return self.runs[config.name, backend]

    def failing(self, config: Config) -> str:
        """The log of a prefix engine that must not start."""
        folder = self.folder / config.name / PREFIX
        assert run(config, PREFIX, self.model, folder) != 0, "the engine should not have started"
        return (folder / "log").read_text(errors="replace")


@pytest.fixture(scope="session")
def engines(model, tmp_path_factory):
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    return Engines(model, shared / "engines")


@pytest.fixture(params=["packs", "row_tiles"])
def server(request, monkeypatch):
    """A backend of one layer over a fake runner, without a GPU: torch runs the words of either
    family of kernels."""
    from tests.sglang.fake_server import Server

    if request.param == "row_tiles":
        say_that_row_tiles_run(monkeypatch.setattr)
    made = Server(monkeypatch)
    is_row_tiles = isinstance(made.backend._executor.backend, TorchRowTiles)
    assert is_row_tiles == (request.param == "row_tiles")
    return made
