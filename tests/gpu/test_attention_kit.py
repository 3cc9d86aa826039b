"""SGLang's own kit of attention unit tests with `--attention-backend prefix`, on a GPU.

All tests of tests/sglang/test_attention_kit.py, over the compiled kernels; what the kit would run
as a graph is captured in one, and its replay is compared. And larger layouts.
"""

import pytest
import torch

from sgl_prefix_attn.execute.backends.choice import why_no_hopper
from sgl_prefix_attn.records import HeadConfig
from tests.sglang.test_attention_kit import (  # noqa: F401
    test_a_faulty_decode_step_is_found,
    test_a_faulty_plan_of_several_tokens_is_found,
    test_decode,
    test_decode_in_a_steady_step,
    test_decode_in_graphs,
    test_extend,
    test_extend_in_split_operations,
    test_verify,
    test_verify_in_graphs,
)
from tests.support import attention_kit
from tests.support.attention_kit import NOTHING, verify
from tests.support.attention_kit_cases import DECODE, EXTEND, SHORT, VERIFY, Layout
from tests.support.shared_rows import Sharing

DEVICE = "cuda"


def _skip_without_hopper() -> None:
    if why_no_hopper(torch.device(DEVICE), HeadConfig(28, 4, 64), torch.float16) is not None:
        pytest.skip("Hopper's kernels are for sm_90")


@pytest.fixture(params=["hopper", "portable"])
def kit(request, monkeypatch):
    if request.param == "hopper":
        _skip_without_hopper()
    with attention_kit.started(monkeypatch, DEVICE, request.param) as made:
        yield made


LARGE = {
    "one_root_4097": Layout(Sharing(((-1, 4097),), (0,) * 5), (1, 0, 63, 700, 5), (32, 8)),
    "tree_37": Layout(
        Sharing(((-1, 1024), (0, 64), (0, 512)), tuple((1, 2, 0, -1)[i % 4] for i in range(37))),
        tuple((31 * i) % 130 for i in range(37)),
        page_size=16,
    ),
    "lengths_1_63_4097": Layout(NOTHING, (0, 62, 4096), (16, 1)),
}


@pytest.mark.parametrize(
    "check", [test_decode, test_decode_in_a_steady_step, test_decode_in_graphs]
)
@pytest.mark.parametrize("layout", LARGE.values(), ids=LARGE)
def test_large_decode(kit, layout, check):
    check(kit, layout.sharing, layout.case(DECODE))


@pytest.mark.parametrize("check", [test_verify, test_verify_in_graphs])
@pytest.mark.parametrize("layout", LARGE.values(), ids=LARGE)
def test_large_verify(kit, layout, check):
    check(kit, layout.sharing, layout.case(VERIFY))


@pytest.mark.parametrize("breakable", [False, True])
@pytest.mark.parametrize("layout", LARGE.values(), ids=LARGE)
def test_large_extend(kit, layout, breakable):
    test_extend_in_split_operations(kit, layout.sharing, layout.case(EXTEND), breakable)


DRAFTS = [("eagle", 2), ("frozen_kv_mtp", 1), ("dflash", 1), ("ngram", 1)]


@pytest.mark.parametrize(("kind", "topk"), DRAFTS)
def test_other_drafts_are_stock(kit, kind, topk):
    kit.run(
        verify.run_dense_spec_verify_case, SHORT.case(VERIFY), SHORT.sharing, topk=topk,
        spec_kind=kind,
    )  # fmt: skip
    assert set(kit.kernels) == {"stock"}
    assert kit.decided == {("stock", "verify_tree"): 1}
