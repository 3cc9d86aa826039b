"""No synchronisation between host and device in a steady step or in one that loads a plan."""

import pytest
import torch

from tests.support.gpu_problems import TREES, gpu_problem
from tests.support.kernels import FAMILIES, planner_of, served_backend
from tests.support.running import executor_of, load

BUSY_CYCLES = 2_000_000_000  # about a second: longer than any step's host time


@pytest.fixture
def forbid_synchronisation():
    """A function that turns PyTorch's synchronisation check on; off again at the end."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(params=FAMILIES)
def prepared(request):
    """Two problems, their plans, an executor on which everything is compiled, and the inputs."""
    problems = [gpu_problem(TREES[name]()) for name in ("mixed", "deep")]
    backend = served_backend(request.param)
    plans = [planner_of(backend).plan(problem.paths) for problem in problems]
    made = executor_of(backend, problems[0], *plans)
    steps = []
    for problem, plan in zip(problems, plans, strict=True):
        steps.append((problem, plan, problem.last_slots(), torch.empty_like(problem.q)))
        replanning_step(made, steps[-1])
    torch.cuda.synchronize()
    return made, steps


def steady_step(made, step, layers=4):
    problem, _, last, out = step
    made.append(problem.seq_lens, last)
    for _ in range(layers):
        made.run(problem.layer(out))


def replanning_step(made, step):
    problem, plan, _, _ = step
    load(made, problem, plan)
    steady_step(made, step)


def test_the_check_itself_finds_a_synchronisation(forbid_synchronisation):
    value = torch.ones(1, device="cuda")
    forbid_synchronisation()
    with pytest.raises(RuntimeError):
        value.item()


@pytest.mark.parametrize("kind", [steady_step, replanning_step])
def test_a_step_never_synchronises(kind, prepared, forbid_synchronisation):
    made, steps = prepared
    forbid_synchronisation()
    for step in steps[::-1] if kind is replanning_step else steps[1:]:
        kind(made, step)


@pytest.mark.parametrize("kind", [steady_step, replanning_step])
def test_a_step_returns_while_the_device_is_busy(kind, prepared):
    """Also what PyTorch does not see: the host is done before the work in front of it is."""
    made, steps = prepared
    busy = torch.cuda.Event()
    torch.cuda._sleep(BUSY_CYCLES)
    busy.record()
    assert not busy.query(), "the device was not kept busy"
    for step in steps[::-1] if kind is replanning_step else steps[1:]:
        kind(made, step)
    assert not busy.query(), "the host waited for the device"


def test_a_new_plan_does_not_overtake_the_step_in_front_of_it(prepared):
    """Loaded while the device is still busy with the last plan's step, more often than there are
    upload buffers: every step runs on its own plan."""
    made, steps = prepared
    wanted = []
    for step in steps:
        replanning_step(made, step)
        wanted.append(step[3].clone())
    outs = [torch.empty_like(steps[i % 2][3]) for i in range(10)]
    torch.cuda._sleep(BUSY_CYCLES // 4)
    for i, out in enumerate(outs):
        replanning_step(made, (*steps[i % 2][:3], out))
    for i, out in enumerate(outs):
        assert torch.equal(out, wanted[i % 2])
