"""Stands in for SGLang's parallel state: what sglang_config.parallel() returns."""

from types import SimpleNamespace


def ranks(tp_size=1, group=None):
    """Rank 0 of so many tensor-parallel ranks, and nothing else in parallel."""
    return SimpleNamespace(
        tp_rank=0,
        tp_size=tp_size,
        tp_group=SimpleNamespace(cpu_group=group),
        pp_rank=0,
        pp_size=1,
        attn_dp_size=1,
        dcp_enabled=False,
    )
