"""Hopper's kernels behind others whose barriers stand where theirs will: an engine's first decode
steps behind a prefill."""

import importlib.util

import pytest
import torch

from sgl_prefix_attn.records import HeadConfig
from tests.gpu.test_kernels import Runner, cuts_of
from tests.support.gpu_problems import DEVICE, TREES, gpu_problem
from tests.support.left_barriers import MOST, leave_barriers
from tests.support.problems import assert_attention

HEADS = {64: HeadConfig(64, 8, 64), 128: HeadConfig(8, 2, 128), 256: HeadConfig(16, 2, 256)}
ROUNDS = 50


def _barriers():
    sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    leave_barriers[(sms,)](MOST, num_warps=4)


def _products():
    """Products of a prompt's size and of a step's, as cuBLAS makes them."""
    for rows in (1, 16, 404, 4096):
        x = torch.ones(rows, 4096, dtype=torch.bfloat16, device=DEVICE)
        for columns in (1024, 6144, 14336):
            x @ torch.ones(4096, columns, dtype=torch.bfloat16, device=DEVICE)


def _flash_attention_3():
    """Prompts over pages of one token, as SGLang's backend reads them."""
    if importlib.util.find_spec("sgl_kernel") is None:
        pytest.skip("sgl_kernel is not importable")
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    for tokens in (404, 8192):
        q, kv = (torch.ones(tokens, n, 128, dtype=torch.bfloat16, device=DEVICE) for n in (8, 2))
        lengths = torch.tensor([tokens], dtype=torch.int32, device=DEVICE)
        flash_attn_with_kvcache(
            q=q, k_cache=kv[:, None], v_cache=kv[:, None], cache_seqlens=lengths,
            page_table=torch.arange(tokens, dtype=torch.int32, device=DEVICE)[None],
            cu_seqlens_q=torch.tensor([0, tokens], dtype=torch.int32, device=DEVICE),
            max_seqlen_q=tokens, causal=True,
        )  # fmt: skip


@pytest.mark.parametrize("others", [_barriers, _products, _flash_attention_3])
@pytest.mark.parametrize("head_dim", HEADS)
def test_results_are_the_same_bits_whatever_ran_before(head_dim, others):
    heads = HEADS[head_dim]
    problem = gpu_problem(TREES["mixed"](), heads)
    plan = next(cuts_of(problem.paths, heads))
    runner = Runner(problem, plan)
    out, lse = runner.run()
    assert_attention(problem, out, lse)
    for _ in range(ROUNDS):
        others()
        again, lse_again = runner.run()
        assert torch.equal(again, out) and torch.equal(lse_again, lse)
