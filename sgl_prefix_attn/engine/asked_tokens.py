"""What an extend or verify batch asks of a plan, told on the host: lengths, and whether its drafts
are chains.

SGLang drafts n-grams on the host and hands the backend their masks on the device alone, so a hook
(patches/ngram_drafts.py) leaves those of the host here.
"""

import numpy as np

# Of the n-gram drafts made last, until the batch that verifies them is observed.
_ngram_masks: list[np.ndarray] = []


def ngrams_drafted(masks: np.ndarray) -> None:
    """Keep the masks of a batch's n-gram drafts: [B * tokens * tokens], which drafted tokens each
    one sees."""
    _ngram_masks[:] = [masks]


def asked(forward_batch) -> tuple[np.ndarray, np.ndarray, str | None] | None:
    """Return seq_lens int [B], new tokens included, query_lens int32 [B] and what stands against a
    plan; None for a batch that neither extends nor verifies, or whose lengths the host lacks."""
    mode, seq_lens = forward_batch.forward_mode, forward_batch.seq_lens_cpu
    if seq_lens is None:
        return None
    if mode.is_target_verify():
        draft = forward_batch.spec_info
        query_lens = np.full(len(seq_lens), draft.draft_token_num, np.int32)
        # without tokens for all, they are of a ragged batch
        whole = len(forward_batch.out_cache_loc) == query_lens.sum()
        against = None if whole and _are_chains(draft, len(seq_lens)) else "verify_tree"
        return seq_lens.numpy() + query_lens, query_lens, against
    if mode.name not in ("EXTEND", "MIXED") or not forward_batch.extend_seq_lens_cpu:
        return None
    return seq_lens.numpy(), np.array(forward_batch.extend_seq_lens_cpu, np.int32), None


def _are_chains(draft, batch_size: int) -> bool:
    """Tell whether each drafted token of each request sees all of its request before it."""
    masks = _ngram_masks.pop() if _ngram_masks else None
    if type(draft).__name__ == "EagleVerifyInput":
        return draft.tree_topk == 1
    if type(draft).__name__ != "NgramVerifyInput" or masks is None:
        return False
    # A request without a match is a tree, too: SGLang fills it up with siblings of the first token.
    chain = np.tri(draft.draft_token_num, dtype=bool).ravel()
    return masks.size == batch_size * chain.size and bool(
        (masks.reshape(-1, chain.size) == chain).all()
    )
