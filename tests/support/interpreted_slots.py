"""Slots and keys of a plan in Triton's interpreter, against the torch interpreter of the words;
run by test_slots.py in a process of its own, because TRITON_INTERPRET=1 must be set before
the kernels are imported. (Attention itself is Gluon's and needs a GPU.)"""

import os

import pytest
import torch

from sgl_prefix_attn.execute import interpreter as oracle
from sgl_prefix_attn.execute.backends.hopper_backend import HopperBackend
from sgl_prefix_attn.execute.executor import PlanExecutor
from sgl_prefix_attn.execute.params import Capacity
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.records import HeadConfig
from tests.support.forests import random_paths
from tests.support.plan_blocks import poisoned_blocks
from tests.support.problems import make_problem

assert os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.parametrize("part_tokens", [0, 128])
@pytest.mark.parametrize("heads", [HeadConfig(8, 2, 8), HeadConfig(7, 1, 8), HeadConfig(2, 2, 8)])
def test_fill_and_append(heads, part_tokens):
    paths = random_paths(5, 23, 9)
    problem = make_problem(paths, heads)
    planner = Planner(heads, num_sms=8, headroom=70, part_tokens=part_tokens)
    forest = build_forest(paths)
    for cut in list(planner.cuts(forest))[::3]:
        plan = planner.serialize(forest, cut)
        words = torch.from_numpy(plan.words.copy())
        want = poisoned_blocks(plan.num_blocks, problem.poison_slot)
        oracle.fill(words, problem.req_to_token, problem.pool, want)
        backend = HopperBackend(heads, torch.float16, torch.device("cpu"), part_tokens=part_tokens)
        executor = PlanExecutor(backend, Capacity.for_plans(plan))
        got = executor.workspace
        got.kv_indices.fill_(problem.poison_slot)
        got.keys.fill_(-1)
        executor.load(plan, problem.req_to_token, problem.pool)
        entries = want.slots.numel()
        for step in (0, 1, 1, 3, 40, 70, 71):  # the last one is behind the headroom
            seq_lens, slots = problem.seq_lens + step, torch.arange(23) + 1000 * step
            oracle.append(words, seq_lens, slots, want)
            executor.append(seq_lens, slots)
            assert torch.equal(words, got.words[: words.numel()])
            assert torch.equal(want.slots, got.kv_indices[:entries])
            assert torch.equal(want.keys, got.keys[:entries])
