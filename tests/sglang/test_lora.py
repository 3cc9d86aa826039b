"""Two LoRA adapters and none in one engine on a CPU: KV is shared under the same adapter alone."""

import pytest

from eval.model_shapes import LLAMA, SHAPES
from tests.sglang.engine import PREFIX, STOCK, Config, plain, run_together
from tests.sglang.test_outputs import CHECKED
from tests.support.lora import write_adapters

pytestmark = [pytest.mark.engine, pytest.mark.long]


@pytest.fixture(scope="module")
def runs(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    arguments = {
        "enable_lora": True, "max_loras_per_batch": 3, "lora_backend": "torch_native",
        "lora_paths": write_adapters(folder / "adapters", LLAMA | SHAPES["tiny"]),
    }  # fmt: skip
    config = Config("lora", plain("adapters"), arguments, {"PROBE_UNPINNED": "1", **CHECKED})
    return run_together({b: (config, b) for b in (STOCK, PREFIX)}, model, folder / "engines")


def test_outputs_equal_stock(runs):
    outputs = runs[PREFIX].outputs["adapters", ""]
    assert outputs == runs[STOCK].outputs["adapters", ""]
    assert len({tuple(output) for output in outputs[::2]}) == 3, "adapters change what is written"


def test_every_step_runs_prefix_kernels(runs):
    steps = runs[PREFIX].steps["adapters", ""]
    assert {(step["variant"], step["reason"]) for step in steps} == {("prefix", "default")}
    assert steps[-1]["mismatches"] == 0 and any(step["cross_check"] for step in steps)


def test_requests_of_different_adapters_share_nothing(runs):
    """A node for each adapter and one for none; a single one would be all six sharing."""
    steps = [step for step in runs[PREFIX].steps["adapters", ""] if len(step["requests"]) == 6]
    assert {step["nodes"] for step in steps if step["nodes"] is not None} == {3}
