"""PAT from a checkout of its source with its extension built: `pat`, --pat-path DIR."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch

from eval.bench_kernel.case import Case
from eval.bench_kernel.providers.provider import Provider, Unsupported

_PAGE_SIZE = 32
_LAUNCHER = "csrc/pat_fwd_launch_template.h"


class Pat(Provider):
    """As released PAT launches on streams that it creates in each call: such a build runs eagerly.
    One patched to fork from torch's current stream is captured like everything else."""

    name = "pat"

    def __init__(self, path: str | None):
        self._path = None if path is None else Path(path).resolve()
        launcher = self._path / _LAUNCHER if self._path else None
        self.capturable = (
            launcher is not None
            and launcher.is_file()
            and "getCurrentCUDAStream" in launcher.read_text(errors="replace")
        )

    def available(self) -> str | None:
        if self._path is None:
            return "needs --pat-path"
        if not torch.cuda.is_available():
            return "needs an NVIDIA GPU"
        try:
            _load(self._path)
        except Exception as error:  # not built, or built for another torch
            return f"cannot import prefix_attn: {type(error).__name__}: {error}"
        return None

    def page_size(self, requested: int) -> int:
        """Return at least 32: a page of 1 or 16 would be refused."""
        return max(_PAGE_SIZE, requested)

    def prepare(self, case: Case) -> PatRunnable:
        if case.heads.group_size not in (1, 2, 4, 8):
            raise Unsupported(f"group size {case.heads.group_size}")
        if case.heads.head_dim not in (64, 128):
            raise Unsupported(f"head dim {case.heads.head_dim}")
        return PatRunnable(case, _load(self._path))


class PatRunnable:
    def __init__(self, case: Case, module):
        self._case = case
        self._module = module
        # The tree keeps pointers into the block table: it must outlive the tree.
        self._block_table = case.pages(case.req_to_token).cpu()
        self._lens = [case.longest] * case.batch_size
        self._q = case.q.unsqueeze(1)
        self._out = [out.unsqueeze(1) for out in case.new_out()]
        self.plan()

    def plan(self) -> None:
        case = self._case
        tree = self._module.PrefixTreeCPP(case.page_size)
        tree.build_radix_tree(self._lens, self._block_table)
        tree.pack_schedule(None, case.heads.group_size, case.heads.num_kv_heads)
        tree.kernel_info.to_gpu(case.device)
        self._tree = tree

    def run(self, layer: int) -> torch.Tensor:
        case = self._case
        self._module.prefix_attn_with_kvcache(
            q=self._q, k_cache_paged=case.paged(case.k[layer]),
            v_cache_paged=case.paged(case.v[layer]), tree=self._tree, softmax_scale=case.sm_scale,
            out=self._out[layer],
        )  # fmt: skip
        return self._out[layer].squeeze(1)


def _load(path: Path):
    if str(path) not in sys.path:
        sys.path.insert(0, str(path))
    return importlib.import_module("prefix_attn")
