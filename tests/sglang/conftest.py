"""Engine runs of the whole suite: each (configuration, backend) is started once."""

import os

import pytest
from filelock import FileLock

from eval.tiny_model import write_tiny_llama
from tests.sglang.engine import PREFIX, Config, Run, result, run_all
from tests.support.torch_hopper import TorchHopper, as_on_hopper


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
                    run_all({folder: (config, backend, self.model)})
            self.runs[config.name, backend] = result(folder)
        return self.runs[config.name, backend]

    def failing(self, config: Config) -> str:
        """The log of a prefix engine that must not start."""
        folder = self.folder / config.name / PREFIX
        run_all({folder: (config, PREFIX, self.model)})
        code = (folder / "exit").read_text()
        assert code not in ("0", "a timeout"), f"the engine should have failed: {code}"
        return (folder / "log").read_text(errors="replace")


@pytest.fixture(scope="session")
def engines(model, tmp_path_factory):
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    return Engines(model, shared / "engines")


@pytest.fixture(params=["portable", "hopper"])
def server(request, monkeypatch):
    """A backend of one layer over a fake runner, without a GPU: torch runs the plans of either
    family of kernels."""
    from tests.sglang.fake_server import Server

    if request.param == "hopper":
        as_on_hopper(monkeypatch.setattr)
    made = Server(monkeypatch)
    is_hopper = isinstance(made.backend.decode.executor.backend, TorchHopper)
    assert is_hopper == (request.param == "hopper")
    return made
