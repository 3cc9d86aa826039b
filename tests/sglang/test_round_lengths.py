"""Which rounds of speculative decoding SGLang must wait for: those that may run a plan.

SGLang's own FutureMap resolves the lengths, asked by our hook as its scheduler would ask it.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative import eagle_worker_common
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sgl_prefix_attn.engine import build_drafts
from sgl_prefix_attn.engine.backend import PrefixAttnBackend
from sgl_prefix_attn.patches import round_lengths
from sgl_prefix_attn.records import Decision
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.step.policy import LENGTHS_AWAITED, STOCK_STEPS
from tests.sglang.fake_drafts import Drafts
from tests.sglang.fake_server import Stock
from tests.sglang.test_verify import eager, verify_batch
from tests.support.fake_sglang import World

PREFIX, UNSHARED = Decision("prefix", "default"), Decision("stock", "unshared")
FASTER, SLOWER = Decision("prefix", "predicted_faster"), Decision("stock", "predicted_slower")
EAGLE, NGRAM = SpeculativeAlgorithm.EAGLE, SpeculativeAlgorithm.NGRAM
FULL_MASK, QLEN_ONLY = TreeMaskMode.FULL_MASK, TreeMaskMode.QLEN_ONLY
UNKNOWN = {"forward": {"seq_lens_cpu": None}}


class Sharing:
    """Predicts that decode steps gain by a plan where anything is shared, and lose otherwise."""

    source = "measured"

    def stock(self, seq_lens, unique, query_lens=None):
        return 1e6 if unique < seq_lens.sum() else 1.0

    def prefix(self, plan):
        return 1e3


@pytest.fixture
def drafts(monkeypatch):
    """A server whose stock backends do without lengths; its requests share nothing."""
    build = build_drafts.build
    monkeypatch.setattr(
        build_drafts, "build", lambda *args: replace(build(*args), predictor=Sharing())
    )
    made = Drafts(monkeypatch)
    made.stock.needs_cpu_seq_lens = made.server.stock.needs_cpu_seq_lens = False
    share(made, False)
    return made


def share(drafts, shared: bool):
    """Let other requests run, of which all but one share 40 tokens, or none."""
    world = drafts.world
    world.cache, world.root, world.next_slot = World().cache, World().root, 1
    del world.reqs[:]
    for i in range(3):
        world.add([0 if shared else i] * 40 + [7 + i], tail=60)
    drafts.grown = torch.ones(3, dtype=torch.int64)


def verify(server, known=True):
    """Verify a batch, whose lengths the host knows or not, and return its decision."""
    before = dict(server.backend.counters.extends)
    batch = verify_batch(server, 1)
    batch.seq_lens_cpu = batch.seq_lens if known else None
    eager(server, batch)
    (decision,) = (d for d, n in server.backend.counters.extends.items() if n != before.get(d, 0))
    return decision


def test_rounds_of_drafts_are_awaited_while_they_run_plans(drafts):
    assert not drafts.backend.needs_cpu_seq_lens
    for _ in range(2 * STOCK_STEPS):
        drafts.round(3, **UNKNOWN)
        assert not drafts.backend.needs_cpu_seq_lens
    share(drafts, True)
    drafts.round(3, **UNKNOWN)
    assert drafts.backend.needs_cpu_seq_lens
    for accepted in (4, 1, 3):
        drafts.assert_right(accepted)
        assert drafts.backend.needs_cpu_seq_lens
    counted = drafts.backend.counters.drafts
    assert counted == {SLOWER: 2 * STOCK_STEPS, LENGTHS_AWAITED: 1, FASTER: 3}
    share(drafts, False)
    drafts.round(3)
    assert not drafts.backend.needs_cpu_seq_lens


def test_batches_that_verify_are_awaited_while_they_run_plans(drafts):
    server = drafts.server
    decisions = [verify(server, known=False) for _ in range(STOCK_STEPS)]
    assert decisions == [UNSHARED] * STOCK_STEPS and not server.backend.needs_cpu_seq_lens
    share(drafts, True)
    assert verify(server, known=False) == LENGTHS_AWAITED
    assert server.backend.needs_cpu_seq_lens
    assert verify(server) == PREFIX and server.backend.needs_cpu_seq_lens
    share(drafts, False)
    assert verify(server) == UNSHARED and not server.backend.needs_cpu_seq_lens


def test_a_server_that_has_turned_to_stock_for_good_waits_no_more(drafts):
    share(drafts, True)
    drafts.assert_right()
    verify(drafts.server)
    assert drafts.backend.needs_cpu_seq_lens and drafts.server.backend.needs_cpu_seq_lens
    drafts.backend._only_stock("kernel_error")
    drafts.server.backend._only_stock("kernel_error")
    assert not drafts.backend.needs_cpu_seq_lens and not drafts.server.backend.needs_cpu_seq_lens


# --- in SGLang's scheduler ------------------------------------------------------------------------


class Scheduler:
    """What SGLang's scheduler has and does where it is about to run a round of two requests."""

    def __init__(self, drafts, extend=None):
        self.tp_worker = SimpleNamespace(model_runner=drafts.server.runner)
        self.drafts, self.extend = drafts, extend or SimpleNamespace(needs_cpu_seq_lens=False)
        self.draft_worker = self
        pool = SimpleNamespace(req_to_token=torch.zeros(8, 4))
        self.future_map = EAGLE.create_future_map("cpu", pool, needs_cpu_seq_lens=True)

    @property
    def spec_v2_attn_backends(self):
        return self.tp_worker.model_runner.attn_backend, self.drafts.backend, self.extend

    def lengths(self, accepted: list[int], algorithm=EAGLE):
        """Verify with so many tokens on the device; what the next round has on either side."""
        rows = torch.tensor([5, 2])
        self.future_map.new_seq_lens_buf[rows] = torch.tensor(accepted)
        batch = SimpleNamespace(
            spec_info=SimpleNamespace(future_indices=rows), spec_algorithm=algorithm
        )
        round_lengths.hook(self, batch)
        self.future_map.resolve_seq_lens_cpu(batch)
        known = batch.seq_lens_cpu
        return batch.seq_lens.tolist(), None if known is None else known.tolist()


def test_the_host_gets_lengths_of_the_rounds_that_need_them(drafts):
    scheduler = Scheduler(drafts)
    assert scheduler.lengths([10, 20]) == ([10, 20], None)
    share(drafts, True)
    drafts.round(**UNKNOWN)
    assert scheduler.lengths([13, 21]) == ([13, 21], [13, 21])
    share(drafts, False)
    drafts.round()
    assert scheduler.lengths([17, 22]) == ([17, 22], None)


@pytest.mark.parametrize("who", ["drafts", "verifies", "extends", "ngrams"])
def test_backends_of_sglang_that_need_lengths_get_them(drafts, who):
    scheduler = Scheduler(drafts)
    if who == "drafts":
        drafts.stock.needs_cpu_seq_lens = True
    elif who == "verifies":
        del drafts.server.stock.needs_cpu_seq_lens
    elif who == "extends":
        scheduler.extend = object()
    algorithm = NGRAM if who == "ngrams" else EAGLE
    assert scheduler.lengths([10, 20], algorithm) == ([10, 20], [10, 20])


@pytest.mark.parametrize("mode", ["decode", "prefill"])
def test_behind_a_prefill_backend_that_verifies_ours_needs_none(drafts, mode):
    """--attention-backend prefix alone, with speculative decoding: drafts and target are stock."""
    share(drafts, True)
    assert verify(drafts.server) == PREFIX
    hybrid = type("HybridAttnBackend", (), {})()
    hybrid.decode_backend, hybrid.prefill_backend = drafts.server.backend, Stock([])
    hybrid.prefill_backend.needs_cpu_seq_lens = False
    hybrid.spec_attn_is_decode = mode == "decode"
    hybrid.needs_cpu_seq_lens = True  # as when it was made
    drafts.server.runner.attn_backend = hybrid
    known = [10, 20] if mode == "decode" else None
    assert Scheduler(drafts).lengths([10, 20]) == ([10, 20], known)


def test_servers_of_other_backends_are_let_alone(drafts):
    """Whatever made SGLang wait there."""
    drafts.server.runner.attn_backend = drafts.backend = stock = Stock([])
    stock.needs_cpu_seq_lens = False
    assert Scheduler(drafts).lengths([10, 20]) == ([10, 20], [10, 20])
    plain = SimpleNamespace(draft_worker=None)
    round_lengths.hook(plain, SimpleNamespace())


def test_drafts_over_plans_get_lengths_beside_a_target_that_sglang_serves_alone(drafts):
    """Else each of their rounds would be planned, and run stock kernels for want of lengths."""
    drafts.server.runner.attn_backend = alone = Stock([])
    alone.needs_cpu_seq_lens = False
    share(drafts, True)
    scheduler = Scheduler(drafts)
    scheduler.future_map.needs_cpu_seq_lens = False  # as SGLang said at start
    for _ in range(5):
        _, known = scheduler.lengths([10, 20])
        drafts.round(3, **(UNKNOWN if known is None else {}))
    assert drafts.backend.counters.drafts[FASTER] == 4


def test_a_worker_that_names_no_backends_drafts_without(drafts):
    scheduler = Scheduler(drafts)
    scheduler.draft_worker = SimpleNamespace()
    drafts.stock.needs_cpu_seq_lens = True
    assert scheduler.lengths([10, 20]) == ([10, 20], None)


@pytest.mark.parametrize("mask", [None, VerifyMask(torch.zeros(32), QLEN_ONLY, 2, is_read=False)])
@pytest.mark.parametrize("behind_hybrid", [False, True])
def test_sglang_builds_the_drafts_of_a_round_without_lengths(drafts, mask, behind_hybrid):
    """In the mask of the backend that verifies, or in one of the longest requests that can be."""
    runner, stock = drafts.server.runner, drafts.server.stock
    stock.max_context_len = 64
    drafts.monkeypatch.setattr(Stock, "verify_mask", mask)
    runner.attn_backend = PrefixAttnBackend(runner, Settings())
    if behind_hybrid:
        hybrid = object.__new__(HybridAttnBackend)
        hybrid.decode_backend, hybrid.prefill_backend = runner.attn_backend, Stock([])
        hybrid.spec_attn_is_decode, hybrid.max_context_len = True, 64
        runner.attn_backend = hybrid
    given = []
    drafts.monkeypatch.setattr(
        eagle_worker_common,
        "build_tree_kernel_efficient",
        lambda *args, **_: given.append((args[5], args[9], args[10])) or [None] * 6,
    )
    batch = SimpleNamespace(
        forward_mode=ForwardMode.DECODE, seq_lens=torch.tensor([9, 5]), seq_lens_sum=None
    )
    eagle_worker_common.build_eagle_verify_input(
        batch, SimpleNamespace(bonus_tokens=None), None, None, torch.zeros(2, 3), None,
        target_worker=SimpleNamespace(model_runner=runner), topk=1, num_steps=3,
        num_draft_tokens=4, tree_mask_mode=FULL_MASK, device="cpu",
    )  # fmt: skip
    assert given == [(0, QLEN_ONLY, mask.buffer) if mask else (2 * 64, FULL_MASK, None)]


def test_sglangs_requests_say_how_many_tokens_they_have():
    assert isinstance(Req.seqlen, property)
