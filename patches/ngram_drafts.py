"""Keeps the masks of n-gram drafts on the host: which of them are chains decides about plans."""

from sgl_prefix_attn.engine.asked_tokens import ngrams_drafted

TARGET = "sglang.srt.speculative.cpp_ngram.ngram_corpus.NgramCorpus.batch_get"
TYPE = "after"
PARAMETERS = ("self", "req_ids", "batch_tokens", "total_lens")
WHY = (
    "the verify input has the masks of n-gram drafts on the device, where asking waits for the GPU"
)


def hook(drafts, *args, **kwargs):
    """Keep the masks of NgramCorpus.batch_get, which returns tokens and masks."""
    ngrams_drafted(drafts[1])
