"""SGLang's kit of attention unit tests, run with our backend.

The kit makes a ModelRunner of one layer, a batch and its KV, runs a backend over them, eagerly or
as CUDA graphs and split operations do, and compares with attention of its own. It has no scheduler
and no radix tree: kit_driver.py stands in for them. Requests may share the first slots of their
rows here, which those of the kit's own cases never do.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch

from sgl_prefix_attn.engine import build, model_facts, sglang_config
from sgl_prefix_attn.engine.runner_backend import find_observer
from sgl_prefix_attn.plugin import entry_point
from tests.support.kit_driver import Driver
from tests.support.shared_rows import Sharing
from tests.support.torch_hopper import PASSED

_KIT = "sglang.test.kits.attention_unittest"
pytest.importorskip("sglang", "0.5.23")  # earlier releases have another kit, or none
_parallel = importlib.import_module("sglang.srt.runtime_context").get_parallel()
_before = dict(_parallel._overrides)
dense = importlib.import_module(f"{_KIT}.attention_methods.dense_attention")
graphs = importlib.import_module(f"{_KIT}.runner_modes.cuda_graph_decode_runner")
split_op = importlib.import_module(f"{_KIT}.runner_modes.split_op_runner")
verify = importlib.import_module(f"{_KIT}.runner_modes.speculative_target_verify_runner")
# Importing the kit changes SGLang's parallel state for good: for the length of a test will do.
_PARALLEL = {**_parallel._overrides, "tp_rank": 0, "pp_rank": 0}
_parallel._overrides = _before

NOTHING = Sharing()
# These write cached KV a second time, as if its slots were in order: in another layout that spoils
# what they have written before, unless a request has no more than a page of it.
_REWRITING = (
    split_op.run_dense_split_op_extend_case,
    verify.run_dense_spec_verify_cuda_graph_case,
)
_FORCED = ("prefix", "forced")
_HIDDEN_SIZE, _HEAD_DIM = 256, 64
# The kit's weights give logits so much alike that outputs shrink as contexts grow, below its
# tolerance of 3e-2 from some hundred tokens on. With these a few tokens stand out in any context.
_SHARPER_Q, _LARGER_V = 8.0, 4.0


@dataclass
class Kit:
    """Runs the kit's cases on a device, and knows what every backend that it made has done.

    kernels  "prefix" or "stock", for each run of either
    """

    device: str
    backends: list = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    change_runner: Callable = lambda runner: None  # before its backend is made
    _runners: list = field(default_factory=list)
    _sharing: Sharing = NOTHING
    _tidy: bool = False  # slots are in order
    _steady: bool = False
    _owners: list[list[int]] = field(default_factory=list)
    _driver: Driver | None = None  # of the last backend

    def run(self, function, case, sharing=NOTHING, *, steady=False, **options) -> None:
        """Run a function of the kit on a case, whose requests share what `sharing` says.

        steady  an eager decode batch is the second step of a plan
        """
        self._sharing, self._steady = sharing, steady
        self._tidy = function in _REWRITING and max(case.prefix_lens) > case.page_size
        self._owners = [sharing.owners(i) for i in range(len(sharing.leaf))]
        options = {"head_dim": _HEAD_DIM, "hidden_size": _HIDDEN_SIZE, **options}
        function(
            self,
            dataclasses.replace(case, backend="prefix"),
            device=self.device,
            max_context_len=-(-max(64, *case.seq_lens) // 64) * 64,
            **options,
        )

    def skipTest(self, reason):
        """What the kit calls where a backend raises an AssertionError or ImportError."""
        raise RuntimeError(reason)

    @property
    def decided(self) -> Counter:
        """(variant, reason) of all batches."""
        every = (backend.counters for backend in self.backends)
        return Counter(
            (decision.variant, decision.reason)
            for counters in every
            for decision in (counters.steps + counters.extends).elements()
        )

    def assert_prefix_ran(self, batches: int, nodes: int | None = None) -> None:
        """All that ran were our kernels, in so many batches, the last one over so many shared
        nodes."""
        assert self.decided == {_FORCED: batches}
        assert set(self.kernels) == {"prefix"}
        if nodes is not None:
            assert self.backends[-1].counters.last_plan.num_nodes == nodes

    # --- what the kit calls instead of its own ---------------------------------------------------

    def _owner(self, i_req: int, pos: int) -> int:
        owners = self._owners[i_req] if i_req < len(self._owners) else ()
        return owners[pos] if pos < len(owners) else i_req

    def _shared_slot(self, slot: Callable, i_req: int, pos: int, **sizes) -> int:
        return slot(self._owner(i_req, pos), pos, **sizes)

    def _shared_slots(self, slots_of: Callable, layout: str, **sizes) -> Callable[[int, int], int]:
        layout = "contiguous" if self._tidy else layout
        return functools.partial(self._shared_slot, slots_of(layout, **sizes))

    def _populate(self, populate: Callable, module, case, runner, hidden, **options) -> None:
        """Give cached tokens that share a slot the same hidden state, before they become KV."""
        for own, owners in zip(hidden, self._owners, strict=False):
            for pos, owner in enumerate(owners[: len(own)]):
                own[pos] = hidden[owner][pos]
        populate(module, case, runner, hidden, **options)

    def _create(self, runner):
        """What makes the backend `prefix`."""
        self._runners.append(runner)
        config, pool = runner.model_config, runner.token_to_kv_pool
        layer = dense.RadixAttention(
            config.num_attention_heads,
            config.head_dim,
            config.head_dim**-0.5,
            config.num_key_value_heads,
            layer_id=0,
            sliding_window_size=config.sliding_window_size or -1,
        )
        runner.model = torch.nn.ModuleList([layer])
        runner.max_total_num_tokens = pool.size
        config.has_attention_sinks = False
        self.change_runner(runner)
        backend = entry_point.create(runner)
        if runner.is_draft_worker:
            return backend
        runner.attn_backend = backend
        observer = find_observer(runner)
        self.backends.append(observer)
        if observer is backend:
            self._note_prefix_kernels(backend, pool)
        else:  # SGLang's own, by itself
            self._note_stock_kernels(backend)
        self._driver = Driver(runner, backend, observer, self._sharing, self._steady)
        return backend

    def _note_prefix_kernels(self, backend, pool) -> None:
        if backend.can_run_prefix:
            for buffer in (*pool.k_buffer, *pool.v_buffer):
                buffer.fill_(math.nan)
            self._note_kernels(backend.decode.executor, "run", "prefix")
        if backend.extends.kinds.any:
            self._note_kernels(backend.extends.lane.executor, "run", "prefix")
        for stock in {backend.stock, backend._stock_extend, backend._stock_verify}:
            self._note_stock_kernels(stock)

    def _note_stock_kernels(self, stock) -> None:
        self._note_kernels(stock, "forward_decode", "stock")
        self._note_kernels(stock, "forward_extend", "stock")

    def _note_kernels(self, owner, name: str, kernels: str) -> None:
        function = getattr(owner, name)

        def noted(*args, **options):
            self.kernels.append(kernels)
            return function(*args, **options)

        setattr(owner, name, noted)

    def _forward(self, original: Callable, fixture, batch, inputs) -> torch.Tensor:
        return self._driver.forward(original, fixture, batch, inputs)


def _sharpen(copy: Callable, module, reference) -> None:
    module.q_proj.weight *= _SHARPER_Q
    module.v_proj.weight *= _LARGER_V
    copy(module, reference)


@contextmanager
def started(patch, device: str, kernels: str = "auto"):
    """Give a Kit on a device, "cpu" or "cuda", whose batches run prefix kernels wherever they can;
    what SGLang keeps for its process is as before at the end.

    patch    pytest's monkeypatch
    kernels  as PREFIX_ATTN_KERNELS names them
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    entry_point.register()
    HookRegistry.apply_hooks()
    # CHECK: the tree that a batch is said to have is compared with its slots.
    variables = {"POLICY": "prefix", "KERNELS": kernels, "PREFILL": 1, "CHECK": 1}
    if kernels == "portable":
        variables["STRATEGY"] = "naive"  # others read nodes as short as these several times
    for name, value in (variables | {"CHECK_EVERY": 1 << 30}).items():
        patch.setenv(f"PREFIX_ATTN_{name}", str(value))
    stock = "torch_native" if device == "cpu" else "flashinfer"  # the kit's servers choose none
    patch.setattr(sglang_config, "default_backend", lambda server_args: stock)
    # They name no algorithm either, whose drafts may be chains.
    patch.setattr(model_facts, "verifies_chains", lambda server_args: True)
    patch.setattr(build, "self_test_verdict", lambda *args, **again: PASSED)  # this is a test
    made = Kit(device)
    patch.setitem(dense.ATTENTION_BACKENDS, "prefix", made._create)

    def replace(owner, name: str, function: Callable) -> None:
        patch.setattr(owner, name, functools.partial(function, getattr(owner, name)))

    replace(dense, "_token_loc", made._shared_slot)
    replace(dense, "make_loc_fn", made._shared_slots)
    replace(dense, "_populate_prefix_kv", made._populate)
    replace(dense, "_copy_dense_weights", _sharpen)
    for mode in (graphs, verify):
        replace(mode, "run_dense_forward", made._forward)
    try:
        with _parallel.override(**_PARALLEL), torch.no_grad():
            yield made
    finally:
        for runner in reversed(made._runners):
            runner._server_args_override.restore()
