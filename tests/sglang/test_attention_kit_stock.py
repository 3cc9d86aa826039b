"""What of SGLang's attention kit is stock with `--attention-backend prefix`, or refused, and why.

Drafts other than chains are in tests/gpu/test_attention_kit.py: torch_native does not verify.
"""

import argparse

import pytest
import torch
from sglang.srt.server_args import ServerArgs

from tests.support import attention_kit
from tests.support.attention_kit import dense
from tests.support.attention_kit_cases import DECODE, SHORT


@pytest.fixture
def kit(monkeypatch):
    """SGLang's own backend runs what is stock."""
    with attention_kit.started(monkeypatch, "cpu") as made:
        yield made


WINDOWS = [
    *dense.make_swa_no_prefix_input_config_cases("prefix"),
    *dense.make_swa_prefix_input_config_cases("prefix"),
    dense.DenseAttentionCase(
        "decode", "prefix", DECODE, 4, 4, 16, (1, 4, 37), sliding_window_size=4
    ),
]


@pytest.mark.parametrize("case", WINDOWS, ids=lambda case: case.name)
def test_sliding_windows_are_stock(kit, monkeypatch, caplog, case):
    rule = dense._SWA_DECODE_EXTEND_WINDOW  # of torch_native and FlashInfer
    monkeypatch.setattr(dense, "_SWA_DECODE_EXTEND_WINDOW", rule | {"prefix"})
    kit.run(dense.run_dense_attention_case, case)
    assert set(kit.kernels) == {"stock"}
    assert "every step runs SGLang's own torch_native (layers:sliding_window)" in caplog.text
    # extend batches are counted where they may run plans
    counted = {("stock", "layers:sliding_window"): 1} if case.forward_mode == DECODE else {}
    assert kit.decided == counted


def test_e5m2_kv_is_stock(kit):
    """The kit has no such pool: the runner says that it has."""
    kit.change_runner = lambda runner: setattr(runner, "kv_cache_dtype", torch.float8_e5m2)
    kit.run(dense.run_dense_attention_case, SHORT.case(DECODE))
    assert set(kit.kernels) == {"stock"}
    assert kit.decided == {("stock", "kv_dtype:float8_e5m2"): 1}


def test_draft_models_get_the_stock_backend(kit):
    kit.change_runner = lambda runner: setattr(runner, "is_draft_worker", True)
    kit.run(dense.run_dense_attention_case, SHORT.case(DECODE))
    assert not kit.backends and not kit.kernels


def test_there_is_no_multimodal_backend_of_this_name():
    """--mm-attention-backend, of encoders; the names are SGLang's."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    with pytest.raises(argparse.ArgumentError, match="invalid choice: 'prefix'"):
        parser.parse_args(["--model-path", "none", "--mm-attention-backend", "prefix"])
