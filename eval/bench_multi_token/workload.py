"""What is asked of every provider, and whether its answer is right."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from eval.bench_kernel.case import Case, build_case
from eval.bench_kernel.oracle import RowJudge, attend_rows
from eval.bench_kernel.trees import Tree
from sgl_prefix_attn.records import HeadConfig

_JUDGED_REQUESTS, _JUDGED_TOKENS = 12, 4


class Workload(NamedTuple):
    """Requests of a tree that ask for their last `tokens` tokens."""

    tree: Tree
    tokens: int

    @classmethod
    def parse(cls, text: str) -> Workload:
        """Raises ValueError for what is no TREE:TOKENS, or for more tokens than are private."""
        tree_text, colon, tokens_text = text.strip().rpartition(":")
        if not colon or not tokens_text.isdigit():
            raise ValueError(f"workload {text!r} must be TREE:TOKENS, such as 1,64_8192,260:4")
        workload = cls(Tree.parse(tree_text), int(tokens_text))
        if not 1 <= workload.tokens <= workload.tree.lengths[-1]:
            raise ValueError(
                f"workload {text!r}: tokens must be 1 to {workload.tree.lengths[-1]}, the length "
                "of the tree's leaves"
            )
        return workload

    @property
    def name(self) -> str:
        return f"{self.tree.name}:{self.tokens}"

    @property
    def query_lens(self) -> np.ndarray:
        return np.full(self.tree.batch_size, self.tokens, np.int32)

    def case(self, heads: HeadConfig, dtype: torch.dtype, device: torch.device) -> Case:
        """A decode case of the tree with a row of q for every query."""
        case = build_case(self.tree, heads, 1, dtype, device, 0)
        generator = torch.Generator(device).manual_seed(1)
        shape = (self.tree.batch_size * self.tokens, *case.q.shape[1:])
        q = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        return replace(case, q=q)


class Judge(RowJudge):
    """Judges some requests' first and last tokens and some between them, by the KV of a layer."""

    def __init__(self, case: Case, tokens: int, layer: int):
        batch = case.tree.batch_size
        requests = np.unique(np.linspace(0, batch - 1, _JUDGED_REQUESTS).astype(int))
        rows, truth, low = [], [], []
        for token in np.unique(np.linspace(0, tokens - 1, _JUDGED_TOKENS).astype(int)):
            rows.append(torch.from_numpy(requests * tokens + token).to(case.device))
            slots = case.req_to_token[torch.from_numpy(requests).to(case.device)]
            sees = case.tree.seq_len - (tokens - 1 - int(token))
            args = (case.q[rows[-1]], case.k[layer], case.v[layer], slots[:, :sees], case.sm_scale)
            truth.append(attend_rows(*args, torch.float64, torch.float64))
            low.append(attend_rows(*args, torch.float32, case.dtype))
        super().__init__(torch.cat(rows), torch.cat(truth), torch.cat(low))
