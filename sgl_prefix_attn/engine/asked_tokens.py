"""What a batch asks of a plan, told on the host: lengths, and whether its drafts are chains."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sgl_prefix_attn.paths.tree_reader import RunningBatch


@dataclass(frozen=True)
class Asked:
    """What a batch asks.

    seq_lens    int [B] KV tokens of each request, new ones included
    query_lens  int32 [B] new tokens of each request
    against     what stands against a plan, or None
    is_exact    as RunningBatch.is_exact
    """

    seq_lens: np.ndarray
    query_lens: np.ndarray
    against: str | None = None
    is_exact: bool = True


def decoding(forward_batch, schedule_batch, req_to_token) -> RunningBatch:
    """Return a decode step's requests with their lengths, new tokens included."""
    lens = forward_batch.seq_lens_cpu.numpy()
    return RunningBatch(schedule_batch.reqs, schedule_batch.tree_cache, lens, req_to_token)


def committed(forward_batch, reqs: Sequence) -> tuple[np.ndarray, bool]:
    """Return the KV tokens of each request before its drafts, int [B], and whether they are exact.

    Where SGLang has not waited for the lengths of speculative decoding, the host knows a request's
    tokens as of the last results that it has processed.
    """
    if forward_batch.seq_lens_cpu is not None:
        return forward_batch.seq_lens_cpu.numpy(), True
    return np.array([req.seqlen for req in reqs], np.int64), False


def asked(forward_batch, reqs: Sequence) -> Asked | None:
    """Return what a batch of these requests asks; None where it neither extends nor verifies, or
    extends and the host lacks its lengths."""
    mode = forward_batch.forward_mode
    if mode.is_target_verify():
        seq_lens, is_exact = committed(forward_batch, reqs)
        draft = forward_batch.spec_info
        query_lens = np.full(len(seq_lens), draft.draft_token_num, np.int32)
        # without tokens for all, they are of a ragged batch
        whole = len(forward_batch.out_cache_loc) == query_lens.sum()
        chains = type(draft).__name__ == "EagleVerifyInput" and draft.tree_topk == 1
        against = None if whole and chains else "verify_tree"
        return Asked(seq_lens + query_lens, query_lens, against, is_exact)
    if mode.name not in ("EXTEND", "MIXED") or not forward_batch.extend_seq_lens_cpu:
        return None
    if forward_batch.seq_lens_cpu is None:
        return None
    query_lens = np.array(forward_batch.extend_seq_lens_cpu, np.int32)
    return Asked(forward_batch.seq_lens_cpu.numpy(), query_lens)
