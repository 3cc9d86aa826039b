"""This library, through its public wrapper: `prefix`, `prefix:STRATEGY` or `prefix:KERNELS`."""

from __future__ import annotations

import torch

from eval.bench_kernel.case import Case
from eval.bench_kernel.providers.provider import Provider


class Prefix(Provider):
    module = "sgl_prefix_attn"
    needs_cuda = False

    def __init__(self, **options: str):
        """options: strategy or kernels of the wrapper."""
        named = [value for value in options.values() if value != "calibrated"]
        self.name = ":".join(["prefix", *named])
        self._options = options

    def prepare(self, case: Case) -> PrefixRunnable:
        return PrefixRunnable(case, self._options)


class PrefixRunnable:
    def __init__(self, case: Case, options: dict[str, str]):
        from sgl_prefix_attn import PrefixDecodeWrapper

        self._case = case
        self._wrapper = PrefixDecodeWrapper(
            *case.head_sizes,
            page_size=case.page_size,
            device=case.device,
            dtype=case.dtype,
            **options,
        )
        self._paths = case.tree.prefix_paths()
        # Lengths are known to the host, as in a server; slots are on the device.
        self._seq_lens = torch.full_like(case.seq_lens, case.tree.seq_len, device="cpu")
        self._rows = torch.arange(case.tree.batch_size, device=case.device)
        self._out = case.new_out()
        self.plan()

    def plan(self) -> None:
        self._wrapper.plan(self._paths, self._seq_lens, self._case.req_to_token, self._rows)

    def run(self, layer: int) -> torch.Tensor:
        kv_cache = (self._case.k[layer], self._case.v[layer])
        return self._wrapper.run(self._case.q, kv_cache, out=self._out[layer])
