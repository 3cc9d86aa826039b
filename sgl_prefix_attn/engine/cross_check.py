"""Comparison of two attention outputs in check mode (PREFIX_ATTN_CHECK=1)."""

import logging

import torch

from sgl_prefix_attn.execute.rounding import why_wrong
from sgl_prefix_attn.metrics.counters import StepCounters


def check_layer(layer, out: torch.Tensor, expected: torch.Tensor, counters: StepCounters) -> None:
    """Count and log a RadixAttention layer whose outputs [rows, Hq * D] of prefix and of stock
    kernels differ by more than rounding. Synchronises."""
    shape = (len(out), layer.tp_q_head_num, layer.v_head_dim)
    difference = why_wrong(out.view(shape), expected.view(shape))
    if difference is not None:
        counters.mismatch()
        counters.log_once(
            "check_mismatch",
            logging.ERROR,
            "layer %d: prefix and stock attention differ: %s",
            layer.layer_id,
            difference,
        )
