"""What a server does around the attention backend and SGLang's attention kit does not."""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
from types import SimpleNamespace

import torch

from tests.support.fake_sglang import RadixCache
from tests.support.shared_rows import Sharing

EAGER, CAPTURE, REPLAY = "eager", "capture", "replay"
_NO_DEVICE = SimpleNamespace(mem_get_info=lambda: (0, 0))


class Driver:
    """Observes each batch before its backend prepares it, and captures graphs in both variants, as
    the plugin's hooks do; on a GPU what the kit calls a graph is one.

    observer  what is told of each batch: the backend, or what counts the steps of SGLang's own
    sharing  what the requests of a batch share
    steady   eager decode batches are second steps of a plan
    """

    def __init__(self, runner, backend, observer, sharing: Sharing, steady: bool):
        self._runner, self._backend, self._observer = runner, backend, observer
        self._sharing, self._steady = sharing, steady
        self._phase, self._graph = EAGER, None
        self._eager = backend.init_forward_metadata
        self._out_graph = backend.init_forward_metadata_out_graph
        backend.init_forward_metadata = self._prepare
        backend.init_forward_metadata_out_graph = self._prepare_graph

    def forward(self, original, fixture, batch, inputs) -> torch.Tensor:
        """Run the kit's forward pass `original`, or record it and replay it later."""
        if self._runner.device == "cpu" or self._phase == EAGER:
            return original(fixture, batch, inputs)
        if self._phase == CAPTURE:
            self._graph = _Graph(fixture, batch, inputs["input_hidden"])
        return self._graph.replay(batch, inputs["input_hidden"])

    def _prepare(self, batch) -> None:
        self._phase = EAGER
        steps = [self._before(batch), batch] if self._steady else [batch]
        schedule = self._schedule(steps[0])
        for step in steps:
            self._observer.observe(step, schedule)
            self._eager(step)

    def _prepare_graph(self, batch, in_capture: bool = False) -> None:
        self._phase = CAPTURE if in_capture else REPLAY
        if not in_capture:
            self._observer.observe(batch, self._schedule(batch))
            self._out_graph(batch)
            return
        capture = functools.partial(self._out_graph, batch, in_capture=True)
        capture()
        if self._observer is self._backend and self._backend.can_capture(batch.forward_mode):
            size = batch.batch_size
            self._backend.variants.capture(size, [size], capture, _NO_DEVICE)

    def _schedule(self, batch) -> SimpleNamespace:
        """What of the ScheduleBatch the backend reads."""
        cached = batch.seq_lens_cpu.clone()  # a verify batch's are those before the draft
        if batch.forward_mode.is_decode():
            cached -= 1
        elif not batch.forward_mode.is_target_verify():
            cached -= torch.tensor(batch.extend_seq_lens_cpu)
        table, rows = self._req_to_token.cpu(), batch.req_pool_indices.tolist()
        reqs = self._sharing.requests(table, rows, cached.tolist())
        return SimpleNamespace(reqs=reqs, tree_cache=RadixCache())

    def _before(self, batch):
        """The step before a decode batch."""
        lens = batch.seq_lens - 1
        slots = self._req_to_token[batch.req_pool_indices.long(), lens.long() - 1].long()
        return dataclasses.replace(
            batch, seq_lens=lens, seq_lens_cpu=batch.seq_lens_cpu - 1, out_cache_loc=slots
        )

    @property
    def _req_to_token(self) -> torch.Tensor:
        return self._runner.req_to_token_pool.req_to_token


class _Graph:
    """One forward pass in a CUDA graph, over memory of its own."""

    def __init__(self, fixture, batch, hidden):
        self._hidden = hidden.clone()
        self._batch = dataclasses.replace(
            batch, seq_lens=batch.seq_lens.clone(), out_cache_loc=batch.out_cache_loc.clone()
        )
        self._step(fixture)
        torch.cuda.synchronize()
        gc.collect()  # a graph of an earlier test, collected during a capture, breaks it
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._out = self._step(fixture)

    def replay(self, batch, hidden) -> torch.Tensor:
        self._hidden.copy_(hidden)
        self._batch.seq_lens.copy_(batch.seq_lens)
        self._batch.out_cache_loc.copy_(batch.out_cache_loc)
        self._out.fill_(math.nan)
        self._graph.replay()
        return self._out.clone()

    def _step(self, fixture) -> torch.Tensor:
        fixture.backend.init_forward_metadata_in_graph(self._batch)
        return fixture.actual_module(self._hidden, self._batch)
