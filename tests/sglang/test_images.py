"""Tiny models that see, in engines on a CPU: their language model's steps run prefix kernels, and
KV of different images is never shared."""

import pytest

from tests.sglang.engine import PREFIX, STOCK, Config, plain, run_together
from tests.sglang.scenarios import OPENING, SYSTEM
from tests.sglang.test_outputs import CHECKED
from tests.support.qwen_vl import FAMILIES, IMAGE_TOKENS, write_model

pytestmark = [pytest.mark.engine, pytest.mark.long]


@pytest.fixture(scope="module", params=FAMILIES)
def runs(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    arguments = {"disable_fast_image_processor": True}  # 0.5.17 runs the fast one on a GPU alone
    # Nodes of so small a model are cheaper merged: naive merges none.
    env = {"PREFIX_ATTN_STRATEGY": "naive", **CHECKED}
    config = Config("images", plain("images"), arguments, env)
    model = write_model(folder / "model", request.param)
    return run_together({b: (config, b) for b in (STOCK, PREFIX)}, model, folder / "engines")


def test_outputs_equal_stock(runs):
    outputs = runs[PREFIX].outputs["images", ""]
    assert outputs == runs[STOCK].outputs["images", ""]
    assert outputs[:2] != outputs[2:4], "the images change what is written"


def test_every_step_runs_prefix_kernels(runs):
    steps = runs[PREFIX].steps["images", ""]
    assert {(step["variant"], step["reason"]) for step in steps} == {("prefix", "default")}
    assert steps[-1]["mismatches"] == 0 and any(step["cross_check"] for step in steps)


def test_different_images_share_nothing(runs):
    """What is read once: the prompt, the token that begins an image, and behind it of each image
    its tokens, the one that ends it and the question's opening."""
    steps = [s for s in runs[PREFIX].steps["images", ""] if len(s["requests"]) == 5]
    plans = [step for step in steps if step["nodes"] is not None]
    assert plans
    of_one_image = IMAGE_TOKENS + 1 + len(OPENING)
    for step in plans:
        assert step["nodes"] == 4
        saved = (5 - 1) * len(SYSTEM) + (4 - 1) + 2 * of_one_image
        assert step["query_centric"] - step["read"] == saved
