"""Both families of kernels, as tests drive them on a GPU."""

from collections.abc import Iterator

import pytest
import torch

from sgl_prefix_attn.execute.backends.choice import new_backend, why_no_backend, why_no_hopper
from sgl_prefix_attn.execute.backends.family import HOPPER, PORTABLE
from sgl_prefix_attn.kernels import words as W
from sgl_prefix_attn.plan.kernel_rates import KernelRates, PortableRates
from sgl_prefix_attn.plan.plan import Plan
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.records import Forest
from tests.support.examples import chosen
from tests.support.gpu_problems import DEVICE, LLAMA

FAMILIES = (HOPPER, PORTABLE)


def backend_of(family, heads=LLAMA, dtype=torch.bfloat16, **options):
    """The kernels of this GPU; skips the test where it has none."""
    device = torch.device(DEVICE)
    why_not = why_no_hopper if family == HOPPER else why_no_backend
    if (reason := why_not(device, heads, dtype)) is not None:
        pytest.skip(f"no {family} kernels here: {reason}")
    return new_backend(family, device, heads, dtype, **options)


def served_backend(family, *args):
    """Those kernels as a server runs them: Hopper's by programmatic dependent launches."""
    return backend_of(family, *args, **({"pdl": True} if family == HOPPER else {}))


def planner_of(backend, headroom=20, **options) -> Planner:
    rates = PortableRates() if backend.splits_nodes else KernelRates()
    return backend.planner(rates, headroom=headroom, **options)


def plans_of_cuts(planner: Planner, forest: Forest, most: int) -> Iterator[Plan]:
    """Plans of some of the forest's cuts: of the first and the last by nodes split off, where the
    kernel can, and by parts, and of what lies between."""
    cuts = sorted(
        planner.cuts(forest),
        key=lambda cut: (-cut.split_off, -int(cut.parts.max()), -cut.most_queries),
    )
    for cut in chosen(cuts, most):
        yield planner.serialize(forest, cut)


def newest(plan, seq_lens):
    """Entries int64 [B] of kv_indices for tokens appended at seq_lens - 1."""
    words = torch.from_numpy(plan.words).long()
    growths = words[words[W.H_GROWTHS] :][: plan.batch_size * W.GROWTH_WORDS]
    growths = growths.view(-1, W.GROWTH_WORDS)
    step = seq_lens.cpu().long() - growths[:, W.G_LEN]
    column = (step - 1) * growths[:, W.G_GROWING] + growths[:, W.G_INDEX]
    return words[growths[:, W.G_ORDER] + column // W.BLOCK] * W.BLOCK + column % W.BLOCK
