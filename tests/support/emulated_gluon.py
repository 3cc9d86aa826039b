"""Runs the row-tile kernel's own source on a CPU: every warpgroup of every CTA is a thread, and a
tensor is torch's. What the threads of a warpgroup do apart is not emulated: layouts, copies that
arrive late, fences. What they do together is: rings, barriers, tickets, counters, products, masks.
"""

from __future__ import annotations

import ast
import inspect
import threading
import time
from types import ModuleType, SimpleNamespace

import numpy as np
import torch
from triton.experimental.gluon import language
from triton.runtime.jit import JITCallable

from tests.support.ptx import LANES, run_warp

LONGEST_WAIT_S = 60
_HERE = threading.local()


def launch(kernel, grid: int, tensors, scalars, constants: dict, faults=()) -> None:
    """Run `kernel` with pointers to `tensors` (None stays) and then `scalars` in `grid` CTAs.

    faults: (function, text, other text) changes of its source. Raises AssertionError where a
    barrier is never passed, and what any of the threads raises.
    """
    run = _Launch(grid, faults)
    body = run.plain(kernel)
    run.together(
        lambda cta=cta: (
            _HERE.__setattr__("cta", cta),
            body(
                *(t if t is None else Pointer(t.view(-1)) for t in tensors), *scalars, **constants
            ),
        )
        for cta in range(grid)
    )


# Python 3.11 miscounts its depth where two threads make syntax trees at once.
_PARSING = threading.Lock()


class Pointer:
    def __init__(self, to: torch.Tensor, at=0):
        self.memory, self.at = to, at
        self.dtype = SimpleNamespace(element_ty=to.dtype)

    def __add__(self, offset):
        return Pointer(self.memory, self.at + offset)

    def __getitem__(self, key):
        return Pointer(self.memory, self.at[key])

    def to(self, dtype, bitcast=False):
        if not bitcast:
            return self
        memory = self.memory.view(dtype)
        return Pointer(memory, self.at * (len(memory) // len(self.memory)))

    def load(self, mask=None, other=0):
        at = torch.as_tensor(self.at)
        if mask is None:
            return self.memory[at].clone()
        at, mask = torch.broadcast_tensors(at, torch.as_tensor(mask))
        return torch.where(mask, self.memory[at.where(mask, 0)], other).to(self.memory.dtype)

    def store(self, value, mask=True):
        at, mask, value = torch.broadcast_tensors(
            *(torch.as_tensor(x) for x in (self.at, mask, value))
        )
        self.memory[at[mask]] = value[mask].to(self.memory.dtype)


class Shared:
    """Memory of a CTA: NaN, or -1, before anything is written."""

    def __init__(self, memory: torch.Tensor):
        self.memory, self.dtype, self.shape = memory, memory.dtype, memory.shape

    def index(self, i):
        return Shared(self.memory[i])

    def slice(self, start, length):
        return Shared(self.memory[start : start + length])

    def _reinterpret(self, dtype, shape, _):
        return Shared(self.memory.view(-1).view(dtype).view(shape))

    def permute(self, order):
        return Shared(self.memory.permute(order))

    def load(self, _):
        return self.memory.clone()

    def store(self, value):
        self.memory.copy_(value)


class Barriers:
    """mbarriers of one number of arrivals: the parity of a phase passes when it is complete."""

    def __init__(self, count: int, arrivals: int, run: _Launch):
        self.arrivals, self.run = arrivals, run
        self.left, self.phase = [arrivals] * count, [0] * count

    def index(self, i):
        return self, int(i)


class _Launch:
    """One launch: its functions in Python, and what its threads wait for."""

    def __init__(self, grid, faults):
        self.grid, self.faults = grid, faults
        self.began = time.monotonic()
        self.moved = threading.Condition()
        self.failed: list[BaseException] = []
        self.made: dict = {}

    # --- threads ---------------------------------------------------------------------------------
    def together(self, bodies) -> None:
        cta = getattr(_HERE, "cta", None)
        threads = [threading.Thread(target=self._guarded, args=(body, cta)) for body in bodies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failed:
            raise self.failed[0]

    def _guarded(self, body, cta) -> None:
        _HERE.cta = cta
        try:
            body()
        except BaseException as error:  # noqa: BLE001  every thread must end
            with self.moved:
                self.failed.append(error)
                self.moved.notify_all()

    def until(self, ready) -> None:
        with self.moved:
            passed = self.moved.wait_for(lambda: self.failed or ready(), LONGEST_WAIT_S)
        assert passed and not self.failed, "a barrier that is never passed"

    def wait(self, barrier, parity) -> None:
        bars, i = barrier
        self.until(lambda: bars.phase[i] & 1 != int(parity))

    def arrive(self, barrier, count) -> None:
        bars, i = barrier
        with self.moved:
            bars.left[i] -= count
            assert bars.left[i] >= 0, "an arrival too many"
            if not bars.left[i]:
                bars.left[i], bars.phase[i] = bars.arrivals, bars.phase[i] + 1
                self.moved.notify_all()

    def atomic_add(self, pointer, value, **_):
        with self.moved:
            old = pointer.load()
            pointer.store(old + value)
            self.moved.notify_all()
        return old

    # --- functions -------------------------------------------------------------------------------
    def plain(self, function: JITCallable):
        """The function in Python: the same source, where `x += y` makes a new x."""
        if function not in self.made:
            name = function.__name__
            source = function.src
            for where, text, other in self.faults:
                if where == name:
                    if text not in source:  # no AssertionError: a test may wait for one
                        raise LookupError(f"{name} has no {text}")
                    source = source.replace(text, other)
            names = self._names(function.__globals__)
            with _PARSING:
                tree = ast.fix_missing_locations(_InPlace().visit(ast.parse(source)))
                code = compile(tree, f"<{name}>", "exec")
            exec(code, names)  # noqa: S102  the project's own source
            self.made[function] = names[name]
        return self.made[function]

    def _names(self, names: dict) -> dict:
        return {name: self._stand_in(name, value) for name, value in names.items()}

    def _stand_in(self, name, value):
        if isinstance(value, ModuleType):
            return {"gl": self._gl, "mbarrier": self._mbarrier, "async_copy": self._async_copy}.get(
                name, lambda: value
            )()
        if isinstance(value, language.constexpr):
            return value.value
        if name in ("Shape", "Rings", "LatentShape", "LatentRings"):
            fields = _fields(value)
            return lambda *args: SimpleNamespace(**dict(zip(fields, args, strict=True)))
        if name in _BY_NAME:
            return _BY_NAME[name]
        if name == "new_barriers":
            return lambda count, arrivals: Barriers(count, arrivals, self)
        if isinstance(value, JITCallable):
            return lambda *args, **kwargs: self.plain(value)(*args, **kwargs)
        return value

    def _mbarrier(self):
        return SimpleNamespace(
            wait=self.wait, arrive=lambda barrier, count=1: self.arrive(barrier, count)
        )

    def _async_copy(self):
        """One thread stands for the 128 of a warpgroup, and arrives for them."""
        return SimpleNamespace(
            mbarrier_arrive=lambda barrier, increment_count: self.arrive(barrier, 128),
            commit_group=lambda: None,
            wait_group=lambda _: None,
        )

    def _asm(self, text, _, args, **kwargs):
        if "over" in text:
            return _grow(text, *args)
        if "shrinks" in text or text.startswith("mul.f32"):
            return args[0] * args[1]
        if "e4m3x2" in text:
            return two_terms(text, *args)
        if "mul.wide" in text:
            return args[0].long() * args[1]
        assert "ld.acquire" in text, text
        time.sleep(1e-3)
        late = time.monotonic() > self.began + LONGEST_WAIT_S
        assert not late and not self.failed, "a part that is never counted"
        return args[0].load()

    def _gl(self):
        return SimpleNamespace(
            **_GL,
            program_id=lambda _: _HERE.cta,
            num_programs=lambda _: self.grid,
            inline_asm_elementwise=self._asm,
            atomic_add=self.atomic_add,
            warp_specialize=lambda roles, *_: self.together(
                lambda role=role, args=args: role(*args) for role, args in roles
            ),
        )


class _InPlace(ast.NodeTransformer):
    def visit_AugAssign(self, node):
        target = ast.Name(node.target.id, ast.Load())
        return ast.Assign([node.target], ast.BinOp(target, node.op, node.value))

    def visit_Attribute(self, node):  # x.type.layout
        self.generic_visit(node)
        return ast.Constant(None) if node.attr == "layout" else node


def _fields(aggregate) -> list[str]:
    """Names of an aggregate's fields, in the order of its arguments."""
    with _PARSING:
        (made,) = ast.parse(inspect.getsource(aggregate)).body
    return [line.target.id for line in made.body if isinstance(line, ast.AnnAssign)]


def _grow(text, top, b_max):
    """Four warps' rows: lane l has rows l / 4 and l / 4 + 8 of its warp's 16, and score l % 4."""
    top, b_max = (x.float().view(4, 2, LANES).numpy() for x in (top, b_max))
    outs = [run_warp(text, 4, [*top[w], *b_max[w]]) for w in range(4)]
    warps = torch.from_numpy(np.array(outs)).view(4, 2, 2, LANES)  # [warp, result, half, lane]
    return tuple(warps[:, i].reshape(64, 4) for i in range(2))


def two_terms(text, x):
    """Four elements a thread; each register of the results holds four bytes."""
    outs = run_warp(text, 2, [*x.float().reshape(-1, 4).T.numpy()])
    narrow = (torch.from_numpy(out.copy()).view(torch.float8_e4m3fn) for out in outs)
    return tuple(term.view(x.shape) for term in narrow)


def _mma(a, b, acc, use_acc=True, is_async=True):
    a, b = (x.memory if isinstance(x, Shared) else x for x in (a, b))
    product = a.float() @ b.float()
    return acc + product if use_acc else product


def _max(x, axis):
    """The largest that is a number, where there is one."""
    if not x.is_floating_point():
        return x.amax(axis)
    return (
        x.nan_to_num(-torch.inf, torch.inf, -torch.inf)
        .amax(axis)
        .where(~x.isnan().all(axis), torch.nan)
    )


def _where(condition, x, y):
    return torch.where(torch.as_tensor(condition), x, y)


def _allocate(dtype, shape, _):
    return Shared(torch.full(shape, torch.nan if dtype.is_floating_point else -1, dtype=dtype))


_LAYOUTS = (
    "BlockedLayout", "SliceLayout", "DotOperandLayout", "NVMMADistributedLayout",
    "NVMMASharedLayout", "SwizzledSharedLayout", "DistributedLinearLayout",
)  # fmt: skip
_GL = {
    **{name: lambda *args: None for name in _LAYOUTS},
    "constexpr": None,
    "int32": torch.int32, "int64": torch.int64, "float32": torch.float32, "float16": torch.float16,
    "float8e4nv": torch.float8_e4m3fn, "bfloat16": torch.bfloat16,
    "pointer_type": lambda dtype: dtype,
    "arange": lambda begin, end, layout=None: torch.arange(begin, end, dtype=torch.int32),
    "zeros": lambda shape, dtype, layout=None: torch.zeros(shape, dtype=dtype),
    "full": lambda shape, value, dtype, layout=None: torch.full(shape, value, dtype=dtype),
    "zeros_like": torch.zeros_like,
    "load": lambda p, mask=None, other=0, cache_modifier="": p.load(mask, other),
    "store": lambda p, value, mask=True: p.store(value, mask),
    "where": _where,
    "minimum": lambda x, y: torch.minimum(torch.as_tensor(x), torch.as_tensor(y)),
    "maximum": lambda x, y: torch.fmax(torch.as_tensor(x), torch.as_tensor(y)),
    "max": _max,
    "sum": lambda x, axis: x.sum(axis),
    "exp2": torch.exp2, "log2": torch.log2, "floor": torch.floor, "abs": torch.abs,
    "reshape": lambda x, shape: x.reshape(shape),
    "permute": lambda x, order: x.permute(order),
    "expand_dims": lambda x, axis: x.unsqueeze(axis),
    "broadcast": torch.broadcast_tensors,
    "split": lambda x: x.unbind(-1),
    "convert_layout": lambda x, layout: x,
    "multiple_of": lambda x, _: x,
    "static_range": range,
    "static_assert": lambda condition, text="": None,
    "device_assert": lambda condition, text: None,
    "allocate_shared_memory": _allocate,
}  # fmt: skip
_BY_NAME = {
    "async_load": lambda to, p, mask=None: to.store(p.load(mask)),
    "warpgroup_mma": _mma,
    "warpgroup_mma_wait": lambda outstanding, deps: deps[0] if len(deps) == 1 else deps,
    "fence_async_shared": lambda: None,
    "group_barrier": lambda: None,
}
