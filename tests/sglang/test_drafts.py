"""Draft models, by the backends that SGLang makes for them, and drafts without a model."""

from copy import copy
from types import SimpleNamespace

import pytest
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative import draft_utils

from sgl_prefix_attn.engine import fallback
from sgl_prefix_attn.engine.runner_backend import find_backend
from sgl_prefix_attn.plugin import entry_point
from tests.sglang.fake_server import PLAIN_SERVER, Server, speculate
from tests.sglang.test_verify import TOKENS


@pytest.fixture
def start(monkeypatch):
    """Start a server that drafts by an algorithm."""

    def started(algorithm):
        speculate(monkeypatch, algorithm)
        return Server(monkeypatch, prefill="prefix")

    return started


def test_a_draft_models_own_backend_is_stock(start, monkeypatch):
    """Of its extend batches; its decode steps have another (test_draft_steps.py)."""
    server = start("EAGLE")
    draft_runner = copy(server.runner)
    draft_runner.is_draft_worker = True
    monkeypatch.setitem(fallback.ATTENTION_BACKENDS, "torch_native", lambda runner: server.stock)
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


def test_ngrams_are_verified_by_stock_kernels(start, caplog):
    """They hardly ever are chains, and have no draft model."""
    with caplog.at_level("INFO"):
        server = start("NGRAM")
    assert "verify batches" not in caplog.text and "draft model" not in caplog.text
    assert "serve prefill batches" in caplog.text
    assert not server.backend.can_capture(ForwardMode.TARGET_VERIFY)


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
