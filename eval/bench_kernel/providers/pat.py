"""PAT from a checkout of its source with its extension built: `pat`, --pat-path DIR."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import torch

from eval.bench_kernel.case import Case
from eval.bench_kernel.providers.provider import Provider, Runnable, Unsupported

_PAGE_SIZE = 32
_LAUNCHER = "csrc/pat_fwd_launch_template.h"


class Pat(Provider):
    """As released PAT launches on streams that it creates in each call: such a build runs eagerly.
    One patched to fork from torch's current stream is captured like everything else."""

    name, module = "pat", "prefix_attn"

    def __init__(self, path: str | None):
        self._path = None if path is None else Path(path).resolve()
        launcher = self._path / _LAUNCHER if self._path else None
        self.capturable = (
            launcher is not None
            and launcher.is_file()
            and "getCurrentCUDAStream" in launcher.read_text(errors="replace")
        )

    def load(self) -> ModuleType:
        if str(self._path) not in sys.path:
            sys.path.insert(0, str(self._path))
        return super().load()

    def available(self) -> str | None:
        return "needs --pat-path" if self._path is None else super().available()

    def page_size(self, requested: int) -> int:
        """Return at least 32: a page of 1 or 16 would be refused."""
        return max(_PAGE_SIZE, requested)

    def prepare(self, case: Case) -> Runnable:
        if case.heads.group_size not in (1, 2, 4, 8):
            raise Unsupported(f"group size {case.heads.group_size}")
        if case.heads.head_dim not in (64, 128):
            raise Unsupported(f"head dim {case.heads.head_dim}")
        module, tree = self.load(), None
        # The tree keeps pointers into the block table: it must outlive the tree.
        block_table, lens = case.page_table.cpu(), [case.longest] * case.batch_size
        q, outs = case.q.unsqueeze(1), [out.unsqueeze(1) for out in case.new_out()]

        def plan() -> None:
            nonlocal tree
            new = module.PrefixTreeCPP(case.page_size)
            new.build_radix_tree(lens, block_table)
            new.pack_schedule(None, case.heads.group_size, case.heads.num_kv_heads)
            new.kernel_info.to_gpu(case.device)
            tree = new

        def run(layer: int) -> torch.Tensor:
            k, v = case.kv(layer)
            module.prefix_attn_with_kvcache(
                q=q, k_cache_paged=k, v_cache_paged=v, tree=tree, softmax_scale=case.sm_scale,
                out=outs[layer],
            )  # fmt: skip
            return outs[layer].squeeze(1)

        plan()
        return Runnable(run, plan)
