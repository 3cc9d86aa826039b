"""What a batch asks of a plan, told on the host: lengths, and whether its drafts are chains."""

from collections.abc import Sequence

import numpy as np

from sgl_prefix_attn.paths.tree_reader import RunningBatch
from sgl_prefix_attn.step.preparer import Step, StepPreparer


def decode_step(steps: StepPreparer, forward_batch, schedule_batch, req_to_token) -> Step | None:
    """Prepare a batch that decodes, and count it; None for any other."""
    if not forward_batch.forward_mode.is_decode() or forward_batch.seq_lens_cpu is None:
        steps.interrupt()
        return None
    lens = forward_batch.seq_lens_cpu.numpy()
    reqs, tree = schedule_batch.reqs, schedule_batch.tree_cache
    return steps.prepare(RunningBatch(reqs, tree, lens, req_to_token))


def committed(forward_batch, reqs: Sequence) -> tuple[np.ndarray, bool]:
    """Return the KV tokens of each request before its drafts, int [B], and whether they are exact.

    Where SGLang has not waited for the lengths of speculative decoding, the host knows a request's
    tokens as of the last results that it has processed.
    """
    if forward_batch.seq_lens_cpu is not None:
        return forward_batch.seq_lens_cpu.numpy(), True
    return np.array([req.seqlen for req in reqs], np.int64), False


def asked(
    forward_batch, schedule_batch, req_to_token
) -> tuple[RunningBatch, np.ndarray, str | None] | None:
    """Read a batch that extends or verifies: the batch, each request's new tokens, int32 [B], and
    the reason why no plan can run it, None where one can. Return None for a batch that does
    neither, and for one that extends while the host lacks its lengths."""
    mode, reqs = forward_batch.forward_mode, schedule_batch.reqs
    is_exact, against = True, None
    if mode.is_target_verify():
        seq_lens, is_exact = committed(forward_batch, reqs)
        draft = forward_batch.spec_info
        query_lens = np.full(len(seq_lens), draft.draft_token_num, np.int32)
        seq_lens = seq_lens + query_lens
        # without tokens for all, they are of a ragged batch
        whole = len(forward_batch.out_cache_loc) == query_lens.sum()
        chains = type(draft).__name__ == "EagleVerifyInput" and draft.tree_topk == 1
        against = None if whole and chains else "verify_tree"
    elif mode.name not in ("EXTEND", "MIXED") or not forward_batch.extend_seq_lens_cpu:
        return None
    elif forward_batch.seq_lens_cpu is None:
        return None
    else:
        seq_lens = forward_batch.seq_lens_cpu.numpy()
        query_lens = np.array(forward_batch.extend_seq_lens_cpu, np.int32)
    batch = RunningBatch(reqs, schedule_batch.tree_cache, seq_lens, req_to_token, is_exact)
    return batch, query_lens, against
