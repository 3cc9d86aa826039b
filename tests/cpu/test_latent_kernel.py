"""The kernel over latent KV, its own source emulated on a CPU: full attention over tiny plans, NaN
that stays with its request, and faults in its source that must be found. And what ptxas makes of it
for Hopper."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from sgl_prefix_attn.execute.backends import choice
from sgl_prefix_attn.execute.backends.choice import why_no_backend, why_no_hopper_on
from sgl_prefix_attn.execute.backends.family import HOPPER, PORTABLE
from sgl_prefix_attn.kernels.latent.latent_attention import latent_tile_kernel
from sgl_prefix_attn.kernels.latent.latent_options import latent_build, latent_constants
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.kernel_rates import LatentRates
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.records import HeadConfig
from tests.cpu.test_hopper_build import SHARED_MEMORY
from tests.support import emulated_gluon, running
from tests.support.builds import SPILL, barriers_made, disassembled, single_arrivals
from tests.support.emulated_latent import EmulatedLatent
from tests.support.forests import path_table
from tests.support.multi_token import multi_token
from tests.support.poison import NAN, POISONS, Poison, assert_contained, forest, poisoned
from tests.support.problems import assert_attention, make_problem, values_of

CTAS = 3  # several items each


def mla(heads: int) -> HeadConfig:
    return HeadConfig(heads, 1, 576, 512)


def plans_of(paths, heads, query_lens=None):
    """One whole and one in most parts."""
    planner = Planner(heads, num_sms=2 * CTAS, rates=LatentRates(), headroom=3, tile_rows=64)
    return running.whole_and_split(planner, build_forest(paths, query_lens))


def executor_of(problem, plan, faults=()):
    return running.emulated(EmulatedLatent, problem, plan, CTAS, faults)


def attend(problem, executor, apart=False, wants_lse=True):
    out = torch.full_like(problem.q[..., :512], math.nan)
    lse = torch.full(out.shape[:2], math.nan) if wants_lse else None
    layer = problem.layer(out, out_lse=lse)
    if apart:  # as SGLang's: of products by head
        q = problem.q[..., :512].transpose(0, 1).contiguous().transpose(0, 1)
        layer = replace(layer, q=q, q_rope=problem.q[..., 512:])
    executor.run(layer)
    assert not executor.workspace.counters.any(), "the next launch starts from counters of 0"
    return (out, lse) if wants_lse else (out,)


# a query's rows fill a tile, or leave some of it empty; keys of bits, and of ranges of rows
@pytest.mark.parametrize(
    ("heads", "apart"),
    [
        (16, True),
        pytest.param(12, False, marks=pytest.mark.slow),
        pytest.param(32, False, marks=pytest.mark.slow),
        pytest.param(1, True, marks=pytest.mark.slow),
    ],
)
def test_tiny_plans_are_full_attention(heads, apart):
    problem = make_problem(forest(90), mla(heads), torch.bfloat16)
    for plan in plans_of(problem.paths, problem.heads):
        assert_attention(problem, *attend(problem, executor_of(problem, plan), apart))


@pytest.mark.long
@pytest.mark.parametrize("heads", [12, 1])  # of a tile of 60 rows, and of 5
def test_shares_of_many_parts_and_few(heads):
    paths = path_table([(-1, 2300)], [0] * 5, [5, 63, 9, 1, 30])
    problem = make_problem(paths, mla(heads), torch.bfloat16)
    planner = Planner(problem.heads, num_sms=40, rates=LatentRates(), headroom=3, tile_rows=64)
    tree = build_forest(paths)
    cuts = {int(cut.parts.max()): cut for cut in planner.cuts(tree)}
    few, many = min(set(cuts) - {1}), max(cuts)
    assert few <= 4 and many > 16, "fewer and more than are merged at once"
    for parts in (few, many):
        executor = executor_of(problem, planner.serialize(tree, cuts[parts]))
        assert_attention(problem, *attend(problem, executor))


@pytest.mark.long
def test_without_an_lse():
    problem = make_problem(forest(90), mla(20), torch.bfloat16)
    for plan in plans_of(problem.paths, problem.heads):
        assert_attention(problem, *attend(problem, executor_of(problem, plan), wants_lse=False))


@pytest.mark.long
def test_growth():
    problem = make_problem(forest(90), mla(8), torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    plan = plans_of(problem.paths, problem.heads)[-1]
    executor = executor_of(problem, plan)
    for _ in range(2):
        executor.append(problem.seq_lens + 1, problem.grow(generator))
    assert_attention(problem, *attend(problem, executor))
    bad = poisoned(problem, Poison("v", NAN, 4, lambda n: n - 1))
    assert_contained(problem, bad, *attend(bad, executor))


@pytest.mark.long
def test_several_query_tokens():
    asked = multi_token(
        path_table([(-1, 130)], [0, 0, -1], [5, 63, 90]), [4, 1, 9], mla(12), torch.bfloat16
    )
    for plan in plans_of(asked.requests.paths, mla(12), np.array([4, 1, 9], np.int32)):
        executor = executor_of(asked.requests, plan)
        assert_attention(asked.queries, *attend(asked.queries, executor))


@pytest.mark.long
@pytest.mark.parametrize("name", POISONS)
def test_requests_that_do_not_see_it_are_not_hit(name):
    problem = make_problem(forest(90), mla(12), torch.bfloat16)
    poison = POISONS[name]
    if "some share" in name:
        poison = poison._replace(token=lambda n: 75)
    bad = poisoned(problem, poison)
    # of the right half alone, too
    late = poisoned(problem, poison)
    if poison.cache == "v":
        late.k = problem.k.clone()
        token = poison.token(int(problem.seq_lens[poison.request]))
        late.k[problem.req_to_token[problem.pool[poison.request], token].long(), 0, 400] = (
            poison.value
        )
        late.v = values_of(late.k, late.heads)
    for plan in plans_of(problem.paths, problem.heads):
        executor = executor_of(problem, plan)
        assert_contained(problem, bad, *attend(bad, executor))
        assert_contained(problem, late, *attend(late, executor))


# What other CTAs do before and behind a CTA's second run.
LATE = {
    "second run": ("gather", "must_run_again(", "__import__('time').sleep(0.5) or must_run_again("),
    "merge": (
        "merge_shares", "wait_for_parts(p_counter, parts)",
        "wait_for_parts(p_counter, parts); __import__('time').sleep(1)",
    ),
}  # fmt: skip


def test_a_half_that_is_counted_stays_as_it_is():
    """An infinite key of the right half, by which a row's score is -inf: the left half is finite
    and counted, the right one makes the CTA run again, which gives the left half other values.
    Whether it is merged before or after that must not matter."""
    problem = make_problem(forest(90), mla(1), torch.bfloat16)
    plan = plans_of(problem.paths, problem.heads)[-1]
    newest = problem.last_slots()[0]
    bad = replace(problem, k=problem.k.clone())
    bad.k[newest, 0, 300] = -math.inf * problem.q[0, 0, 300].sign()
    bad.v = values_of(bad.k, bad.heads)
    results = [attend(bad, executor_of(bad, plan, (fault,))) for fault in LATE.values()]
    assert results[0][0][0, 0, 512 // 2 :].isnan().all(), "the CTA runs again"
    for one, other in zip(*results, strict=True):
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


FAULTS = {
    "no mask": ("score", "& MASKED) != 0", "& MASKED) == 99"),
    "a block is left out": ("score", "range(num_blocks)", "range(num_blocks - 1)"),
    "the right half shrinks late": ("score", "r.alpha.store(gl.max(alpha, 1))", "pass"),
    "a part is not counted": ("count_half", "WG, 1, sem", "WG, 0, sem"),
    "a share is left out": ("merge_shares", "first = ", "first = share + 0 * "),
    "a row of each share is left out": ("merge_rows", "row < end", "row < end - 1"),
    "columns stay swapped": ("merge_rows", "result = swap_columns(", "result = (lambda x, _: x)("),
    "a counter stays": ("leave", "(LEFT + 1) * parts", "LEFT * parts"),
    "parts without their scales": ("add_parts", "(weight * scale)", "weight"),
    "no cleaning": ("gather_items", "clean_rows(", "(lambda *_: None)("),
    "the rope is left": ("clean_rows", "kr.slice(i, STEP).store", "(lambda *_: None)"),
    "no second run": ("score", "must_run_again(r, 4) != 0", "False"),
}


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, monkeypatch):
    monkeypatch.setattr(emulated_gluon, "LONGEST_WAIT_S", 3)
    problem = make_problem(forest(90), mla(12), torch.bfloat16)
    bad = poisoned(problem, POISONS["private V"])
    plan = plans_of(problem.paths, problem.heads)[-1]
    with pytest.raises(AssertionError):
        executor = executor_of(problem, plan, (FAULTS[fault],))
        assert_attention(problem, *attend(problem, executor))
        assert_contained(problem, bad, *attend(bad, executor))


# --- the build, and which layers it is for --------------------------------------------------------


def build(heads, has_lse):
    constants = latent_constants(heads, has_lse=has_lse)
    kinds = dict.fromkeys(("q", "rope", "kv", "out"), "bf16")
    kinds |= {"lse": "fp32", "partial_out": "fp16", "partial_state": "fp32"}
    kinds |= dict.fromkeys(("counters", "words", "slots", "keys"), "i32")
    signature = {f"{name}_ptr": f"*{kind}" for name, kind in kinds.items()}
    strides = ("q", "q_head", "rope", "rope_head", "kv", "out")
    signature |= {f"stride_{name}": "i32" for name in strides}
    signature |= {"sm_scale": "fp32"} | dict.fromkeys(constants, "constexpr")
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, kind in enumerate(signature.values())
        if kind not in ("fp32", "constexpr")
    }
    return triton.compile(
        GluonASTSource(latent_tile_kernel, signature, constants, aligned),
        target=GPUTarget("cuda", 90, 32),
        options=latent_build(),
    )


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_once")
@pytest.mark.parametrize(
    "heads", [16, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 8, 12, 20, 24, 32))]
)
def test_no_spills_and_hopper_instructions(heads, tmp_path):
    compiled = build(heads, has_lse=heads != 16)
    assert compiled.metadata.shared <= SHARED_MEMORY
    sass, usage = disassembled(compiled, tmp_path)
    assert re.search(r"STACK:0 .*LOCAL:0 ", usage)
    assert not SPILL.search(sass), "registers are spilled"
    # 576 / 16 products for scores, and BLOCK / 16 for either half of the values
    assert len(re.findall(r"\bHGMMA", sass)) == 36 + 2 * 4
    assert "LDGSTS.E.BYPASS.128" in sass, "rows are not copied 16 bytes a thread"
    assert sass.count("STG.E.128") == 2 * 16, "partial results are not stored 16 bytes a thread"
    # each warpgroup waits for parts, and then has sixteen loads of them on their way
    assert sass.count("CCTL.IVALL") == 2
    assert barriers_made(sass) == 4 * 2 + 5
    assert single_arrivals(compiled.asm["ptx"]) > 0
    loads = [len(re.findall(rf"LDG\.E\.{bits}\.STRONG", sass)) for bits in (128, 64)]
    assert loads == [2 * 3 * 16, 2 * 16]


def test_there_is_no_portable_one(monkeypatch):
    monkeypatch.setattr(choice, "why_no_backend", lambda *args: None)
    monkeypatch.setattr(choice, "_runs_triton", lambda device: True)
    with pytest.raises(ValueError, match="no portable kernels on cpu for layers:latent"):
        choice.new_backend(PORTABLE, torch.device("cpu"), mla(16), torch.bfloat16)


def test_there_is_none_for_aligned_plans(monkeypatch):
    monkeypatch.setattr(choice, "why_no_backend", lambda *args: None)
    with pytest.raises(ValueError, match="aligned plans over latent KV"):
        choice.new_backend(HOPPER, torch.device("cpu"), mla(16), torch.bfloat16, part_tokens=2048)


def test_for_which_layers_it_is_built():
    bf16 = torch.bfloat16
    assert why_no_hopper_on((9, 0), mla(16), bf16) is None
    assert why_no_hopper_on((9, 0), mla(32), bf16) is None
    assert why_no_hopper_on((9, 0), mla(64), bf16) == "group_size:64"
    assert why_no_hopper_on((9, 0), mla(16), torch.float16) == "dtype:float16"
    assert why_no_hopper_on((9, 0), mla(16), bf16, torch.float8_e4m3fn) == "kv_dtype:float8_e4m3fn"
    assert why_no_hopper_on((9, 0), HeadConfig(16, 1, 320, 256), bf16) == "latent_dim:256"
    assert why_no_hopper_on((10, 0), mla(16), bf16) == "compute:10.0"
    assert why_no_backend(torch.device("cpu"), mla(64), bf16) is None
    with pytest.raises(ValueError, match="33 query heads over latent KV: 1 to 32"):
        latent_constants(33, has_lse=False)
