"""Where drafts come from: n-grams, chains or trees by what SGLang's corpus answers, and draft
models, by the backends that SGLang makes for them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.speculative import draft_utils
from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus
from sglang.srt.speculative.ngram_info import NgramVerifyInput

from sgl_prefix_attn.engine.runner_backend import find_backend
from sgl_prefix_attn.plugin import entry_point
from tests.sglang.fake_server import PLAIN_SERVER, Server
from tests.sglang.test_verify import PREFIX, TOKENS, TREE, eager, expected, verify_batch


@pytest.fixture
def start(monkeypatch):
    """Start a server that drafts by an algorithm."""

    def started(algorithm):
        monkeypatch.setitem(PLAIN_SERVER, "speculative_algorithm", algorithm)
        return Server(monkeypatch, prefill="prefix")

    return started


# --- n-grams --------------------------------------------------------------------------------------

CHAIN = np.tri(TOKENS, dtype=np.int64)
# What the corpus answers: two matches that part, and matches that are filled up with siblings.
TREES = {
    "branching": np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]),
    "filled_up": np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]),
    "no_match": np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]]),
}


def ngrams(server, grown, masks):
    """A batch whose drafts are of so many masks, drafted as SGLang's worker has its corpus do."""
    entry_point.register()
    HookRegistry.apply_hooks()
    corpus = object.__new__(NgramCorpus)
    answer = np.zeros(TOKENS * len(masks), np.int64), np.stack(masks).ravel()
    corpus._obj = SimpleNamespace(match_stateful=lambda *asked: answer)
    corpus._req_id_to_state_id, corpus._next_state_id = {}, 0
    assert corpus.batch_get([f"{i}" for i in range(len(masks))], [], []) is answer
    batch = verify_batch(server, grown)
    batch.spec_info = NgramVerifyInput(
        draft_token=None, custom_mask=torch.ones(1), draft_token_num=TOKENS
    )
    return batch


def test_ngrams_that_are_chains_are_verified_over_a_plan(start):
    server = start("NGRAM")
    for grown in (1, 3):
        batch = ngrams(server, grown, [CHAIN] * 3)
        q, out = eager(server, batch)
        torch.testing.assert_close(out, expected(server, q, batch), rtol=1e-5, atol=1e-5)
    assert not server.stock.calls and server.backend.counters.extends == {PREFIX: 2}


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("request_of_three", [0, 2])
def test_one_request_whose_ngrams_are_a_tree_makes_the_batch_stock(start, tree, request_of_three):
    server, masks = start("NGRAM"), [CHAIN] * 3
    masks[request_of_three] = TREES[tree]
    eager(server, ngrams(server, 1, masks))
    assert server.stock.calls == ["metadata", "extend"]
    assert server.backend.counters.extends == {TREE: 1}


def test_masks_are_of_the_batch_that_was_drafted_last_and_of_it_alone(start):
    server = start("NGRAM")
    eager(server, ngrams(server, 1, [CHAIN] * 2))  # of two requests, where three are verified
    again = ngrams(server, 2, [CHAIN] * 3)
    eager(server, again)
    eager(server, again)  # nothing was drafted for it
    assert server.backend.counters.extends == {TREE: 2, PREFIX: 1}


# --- draft models ---------------------------------------------------------------------------------


def test_a_draft_models_own_backend_is_stock(start):
    """Of its extend batches; its decode steps have another (test_draft_steps.py)."""
    server = start("EAGLE")
    draft_runner = SimpleNamespace(
        is_draft_worker=True,
        attn_backend=server.backend,
        model_config=SimpleNamespace(is_encoder_decoder=False, attention_arch=None),
    )
    assert entry_point.create(draft_runner) is server.stock
    assert find_backend(draft_runner) is None, "no hook hands its batches to us"


def test_drafts_of_other_kinds_run_stock_kernels_and_the_log_says_so(start, caplog):
    with caplog.at_level("INFO"):
        start("DFLASH")
    assert "the draft model runs stock kernels (speculative:DFLASH)" in caplog.text


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ({"speculative_num_steps": 1}, "one_step"),
        ({"enable_multi_layer_eagle": True}, "multi_layer"),
    ],
)
def test_drafts_without_decode_steps_are_told(start, monkeypatch, caplog, option, reason):
    for name, value in option.items():
        monkeypatch.setitem(PLAIN_SERVER, name, value)
    with caplog.at_level("INFO"):
        start("EAGLE")
    assert f"the draft model runs stock kernels ({reason})" in caplog.text


def test_ngrams_have_no_draft_model(start, caplog):
    with caplog.at_level("INFO"):
        start("NGRAM")
    assert "verify batches" in caplog.text and "draft model" not in caplog.text


def test_sglang_drafts_with_backends_of_its_own_alone(monkeypatch):
    """So ours is put around the one that its factory makes."""
    factory = object.__new__(draft_utils.DraftBackendFactory)
    vars(factory).update(
        draft_model_runner=SimpleNamespace(model_config=SimpleNamespace(hf_config=None)),
        speculative_num_steps=TOKENS - 1,
        draft_attn_backend="prefix",
        server_args=None,
        qsa_profile=None,
    )
    monkeypatch.setattr(draft_utils, "attention_backends", lambda: ("prefix",) * 2, raising=False)
    with pytest.raises(ValueError, match="EAGLE is not supported in decode .* prefix"):
        factory.create_decode_backend()
