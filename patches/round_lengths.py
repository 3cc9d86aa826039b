"""Lets a round of speculative decoding start before its lengths are known, where stock kernels run.

With overlap scheduling SGLang prepares a round while the GPU still verifies the one before, and
waits for the lengths only if a backend said at the start of the server that it needs them.
"""

from sgl_prefix_attn.engine.runner_backend import need_lengths, speculates

TARGET = "sglang.srt.managers.scheduler.Scheduler.run_batch"
TYPE = "before"
PARAMETERS = ("self", "batch")
WHY = "whether the host must wait for lengths depends on what the next round runs"


def hook(scheduler, batch, *_args, **_kwargs):
    """Ask the backends of speculative decoding again, where one of them is ours.

    SGLang always waits with n-grams and with two-batch overlap, behind whose wrapper none is found.
    """
    worker = scheduler.draft_worker
    if worker is None or batch.spec_algorithm.is_ngram():
        return
    runner = scheduler.tp_worker.model_runner
    backends = getattr(worker, "spec_v2_attn_backends", (runner.attn_backend,))
    if speculates(runner, backends):
        scheduler.future_map.needs_cpu_seq_lens = need_lengths(backends)
