"""Runs plans on an executor whose memory is poisoned wherever nothing may be read."""

import math

import torch

from sgl_prefix_attn import PrefixAttentionWrapper
from sgl_prefix_attn.execute.backends.choice import new_backend
from sgl_prefix_attn.execute.backends.family import PORTABLE
from sgl_prefix_attn.execute.backends.torch_backend import TorchBackend
from sgl_prefix_attn.execute.executor import PlanExecutor
from sgl_prefix_attn.execute.params import Capacity
from tests.support.forests import chain

PADDING = 3  # rows of q and out above the batch, as in a captured graph


def executor(problem, *plans, family=PORTABLE):
    """Room for the plans on the kernels of the problem's device; memory is poisoned."""
    device = problem.q.device
    if device.type == "cpu":
        backend = TorchBackend(problem.heads, problem.dtype, device, plans[0].tile_rows)
    else:
        backend = new_backend(family, device, problem.heads, problem.dtype)
    return executor_of(backend, problem, *plans)


def executor_of(backend, problem, *plans):
    """Room for the plans on these kernels; memory is poisoned."""
    made = PlanExecutor(backend, Capacity.for_plans(*plans))
    poison(made, problem)
    return made


def emulated(kind, problem, plan, ctas, faults=()):
    """A loaded executor over a kernel's own source, run by so many CTAs."""
    backend = kind(problem.heads, problem.dtype, torch.device("cpu"))
    backend.num_sms, backend.faults = ctas, faults
    made = executor_of(backend, problem, plan)
    load(made, problem, plan)
    return made


def whole_and_split(planner, tree):
    """Plans of a cut whose tiles have one part each, and of one with most."""
    cuts = sorted(planner.cuts(tree), key=lambda cut: int(cut.parts.max()))
    assert cuts[0].parts.max() == 1 < cuts[-1].parts.max()
    return [planner.serialize(tree, cut) for cut in (cuts[0], cuts[-1])]


def poison(made, problem):
    """Point all of kv_indices at the poison slot, for every query, and fill partial rows with
    NaN."""
    made.workspace.kv_indices.fill_(problem.poison_slot)
    made.workspace.keys.fill_(-1)
    made.workspace.partial_out.fill_(math.nan)
    made.workspace.partial_state.fill_(math.nan)


def load(made, problem, plan):
    made.load(plan, problem.req_to_token, problem.pool)


def loaded(problem, plan, **options):
    made = executor(problem, plan, **options)
    load(made, problem, plan)
    return made


def run(made, problem):
    """out and LSE, from outputs full of NaN; the padding rows must keep theirs."""
    batch = problem.q.shape[0]
    q = problem.q.new_full((batch + PADDING, *problem.q.shape[1:]), math.nan)
    q[:batch] = problem.q
    out = torch.full_like(q[..., : problem.heads.value_dim], math.nan)
    lse = torch.full(q.shape[:2], math.nan, device=q.device)
    made.run(problem.layer(out, q=q, out_lse=lse))
    assert out[batch:].isnan().all() and lse[batch:].isnan().all(), "padding rows were written"
    return out[:batch], lse[:batch]


def append(made, problem, slots):
    """Append a step's slots with padding rows; twice, because a capture does so too."""
    padded = torch.cat([slots, slots.new_zeros(PADDING)])
    for _ in range(2):
        made.append(problem.seq_lens, padded)


def wrapper(heads, dtype=torch.float32, device="cpu", kernels="auto", **options):
    options["kernels"] = kernels
    sizes = (heads.num_qo_heads, heads.num_kv_heads, heads.head_dim)
    return PrefixAttentionWrapper(*sizes, device=device, dtype=dtype, **options)


def wrapper_of(problem, **options):
    """A wrapper without a plan for the problem's model."""
    options = {"sm_scale": problem.sm_scale, "logits_soft_cap": problem.soft_cap, **options}
    return wrapper(problem.heads, problem.dtype, problem.q.device, **options)


def paths_of(table):
    """The (node_id, length) lists that PrefixAttentionWrapper.plan takes."""
    rows = range(table.leaf.size)
    return [
        [(int(table.node_id[n]), int(table.length[n])) for n in chain(table, row)] for row in rows
    ]


def plan_wrapper(made, problem):
    seq_lens, pool = problem.seq_lens.cpu(), problem.pool.cpu()
    made.plan(paths_of(problem.paths), seq_lens, problem.req_to_token, pool)
    return made


def planned_wrapper(problem, **options):
    return plan_wrapper(wrapper_of(problem, **options), problem)


def plan_several(made, asked):
    """Plan the several tokens that a tests.support.multi_token problem asks of each request."""
    of, pool = asked.requests, asked.requests.pool.cpu()
    made.plan(
        paths_of(of.paths), of.seq_lens.cpu(), of.req_to_token, pool, query_lens=asked.query_lens
    )
    return made


def planned_several(asked, **options):
    return plan_several(wrapper_of(asked.requests, **options), asked)
