"""SGLang's own kit of attention unit tests with `--attention-backend prefix`, our kernels on.

Here over the torch executors, where graphs are the kit's own: it runs what would be captured. On a
GPU the same tests run the compiled kernels, in CUDA graphs (tests/gpu/test_attention_kit.py).
"""

from dataclasses import replace

import pytest

from eval.compare_outputs.faults import FAULTS
from sgl_prefix_attn.engine import backend as backend_module
from sgl_prefix_attn.plan.planner import Planner
from tests.sglang.fake_server import Stock
from tests.support import attention_kit
from tests.support.attention_kit import dense, graphs, split_op, verify
from tests.support.attention_kit_cases import DECODE, EXTEND, SHORT, VERIFY, cases
from tests.support.multi_token import CHAIN_FAULTS
from tests.support.plan_faults import plant
from tests.support.torch_hopper import as_on_hopper


class WrongStock(Stock):
    """A prefix batch that ran it would be found."""

    def get_cuda_graph_seq_len_fill_value(self):
        return 1


@pytest.fixture
def stock(monkeypatch):
    """What runs stock batches: nothing that is right."""
    monkeypatch.setattr(backend_module, "create_stock", lambda *which: WrongStock([]))


@pytest.fixture(params=["hopper", "portable"])
def kit(request, monkeypatch, stock):
    """Either family of kernels, run in torch."""
    if request.param == "hopper":
        as_on_hopper(monkeypatch.setattr)
    with attention_kit.started(monkeypatch, "cpu", request.param) as made:
        yield made


# --- prefix kernels run, and are right ------------------------------------------------------------


@pytest.mark.parametrize(("sharing", "case"), cases(DECODE))
def test_decode(kit, sharing, case):
    kit.run(dense.run_dense_attention_case, case, sharing)
    kit.assert_prefix_ran(batches=1, nodes=sharing.num_shared)


@pytest.mark.parametrize(("sharing", "case"), cases(DECODE))
def test_decode_in_a_steady_step(kit, sharing, case):
    """With a token more, the one of the step before, whose plan still holds."""
    longer = replace(case, prefix_lens=tuple(n + 1 for n in case.prefix_lens))
    kit.run(dense.run_dense_attention_case, longer, sharing, steady=True)
    kit.assert_prefix_ran(batches=2, nodes=sharing.num_shared)
    assert kit.backends[0].counters.plans.total() == 1


@pytest.mark.parametrize(("sharing", "case"), cases(DECODE))
def test_decode_in_graphs(kit, sharing, case):
    """Eagerly, too: the kit compares both with its own and with each other."""
    kit.run(
        graphs.run_dense_cuda_graph_decode_case, case, sharing,
        cuda_graph_capture_batch_size=case.batch_size + 1,
    )  # fmt: skip
    kit.assert_prefix_ran(batches=2, nodes=sharing.num_shared)


@pytest.mark.parametrize("layout", ["shuffled_pages", "interleaved_pages", "non_monotonic_extend"])
@pytest.mark.parametrize(("sharing", "case"), cases(EXTEND))
def test_extend(kit, sharing, case, layout):
    kit.run(dense.run_dense_attention_case, case, sharing, loc_layout=layout)
    kit.assert_prefix_ran(batches=1)


@pytest.mark.parametrize("breakable", [False, True])
@pytest.mark.parametrize(("sharing", "case"), cases(EXTEND))
def test_extend_in_split_operations(kit, sharing, case, breakable):
    """With rows of padding behind the batch's tokens."""
    kit.run(
        split_op.run_dense_split_op_extend_case, case, sharing,
        breakable=breakable, static_num_tokens=case.num_input_tokens + 5,
    )  # fmt: skip
    kit.assert_prefix_ran(batches=2)


@pytest.mark.parametrize(("sharing", "case"), cases(VERIFY))
def test_verify(kit, sharing, case):
    kit.run(verify.run_dense_spec_verify_case, case, sharing, topk=1)
    kit.assert_prefix_ran(batches=1)


@pytest.mark.parametrize(("sharing", "case"), cases(VERIFY))
def test_verify_in_graphs(kit, sharing, case):
    kit.run(
        verify.run_dense_spec_verify_cuda_graph_case, case, sharing,
        topk=1, cuda_graph_capture_batch_size=case.batch_size + 1,
    )  # fmt: skip
    kit.assert_prefix_ran(batches=2)


# --- and are found where they are not -------------------------------------------------------------

FAR = "Tensor-likes are not close"


SEVERAL = {
    EXTEND: (dense.run_dense_attention_case, {}),
    VERIFY: (verify.run_dense_spec_verify_case, {"topk": 1}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_decode_step_is_found(kit, monkeypatch, fault):
    planted = plant(monkeypatch, fault)
    with pytest.raises(AssertionError, match=FAR):
        kit.run(dense.run_dense_attention_case, SHORT.case(DECODE), SHORT.sharing, steady=True)
    kit.assert_prefix_ran(batches=2, nodes=1)
    assert planted


@pytest.mark.parametrize("fault", [*CHAIN_FAULTS, "drop_node", "swap_tails"])
@pytest.mark.parametrize("mode", SEVERAL, ids=lambda mode: mode.name)
def test_a_faulty_plan_of_several_tokens_is_found(kit, monkeypatch, mode, fault):
    planted, plan = [], Planner.plan_forest

    def faulty(self, forest, before=None):
        made = plan(self, forest, before)
        if forest.query_lens is not None and forest.query_lens.max() > 1:
            CHAIN_FAULTS[fault](made.words)
            planted.append(fault)
        return made

    if fault in CHAIN_FAULTS:
        monkeypatch.setattr(Planner, "plan_forest", faulty)
    else:
        planted = plant(monkeypatch, fault)
    function, options = SEVERAL[mode]
    with pytest.raises(AssertionError, match=FAR):
        kit.run(function, SHORT.case(mode, new=(4, 4)), SHORT.sharing, **options)
    kit.assert_prefix_ran(batches=1)
    assert planted


def test_a_tree_that_lies_is_found(kit, monkeypatch):
    """It says that slots are shared, and they are not."""
    monkeypatch.setattr(kit, "_owner", lambda i_req, pos: i_req)
    with pytest.raises(AssertionError, match=FAR):  # of the stand-in for stock
        kit.run(dense.run_dense_attention_case, SHORT.case(DECODE), SHORT.sharing)
    assert kit.decided == {("stock", "check_failed"): 1}
