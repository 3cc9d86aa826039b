"""An SGLang platform for machines without a GPU: plain PyTorch on the CPU, no sgl_kernel.

Opt-in: PREFIX_ATTN_CPU_PLATFORM=1. SGLang's own CPU engine needs sgl_kernel, an extra build;
an out-of-tree platform selects the native forward of every layer instead. It never takes over a
machine on which SGLang would choose another platform.

SGLang calls `activate` in every process (entry point group `sglang.srt.platforms`).
"""

import functools
import logging
import os

import torch
from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.platforms.device_mixin import PlatformEnum

from sgl_prefix_attn.settings import CPU_PLATFORM

_log_once = functools.cache(logging.getLogger(__name__).log)


def is_active() -> bool:
    """Tell whether this process serves here: asked for, and SGLang would choose no other platform.

    Not for a bad value, which is logged: if it were raised, SGLang would go on without the plugin,
    and so without the check of its settings that stops a server.
    """
    try:
        if not CPU_PLATFORM.read(os.environ):
            return False
    except ValueError as error:
        _log_once(logging.ERROR, "no CPU platform: %s", error)
        return False
    cpu_engine = os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1"  # SGLang's own
    return not (cpu_engine or torch.cuda.is_available() or torch.xpu.is_available())


def activate() -> str | None:
    """SGLang's platform entry point: the class to use, or None to step aside."""
    return f"{__name__}.{TorchCpuPlatform.__qualname__}" if is_active() else None


class TorchCpuPlatform(CpuSRTPlatform):
    """CPU device operations of SGLang, native forwards, host-side index helpers in torch."""

    _enum = PlatformEnum.OOT  # MultiPlatformOp then chooses forward_native: no sgl_kernel needed

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    # SGLang's profiler asks each platform that is not its own, whatever is to be profiled. By the
    # name "CPU", which it knows, its second version would start two profilers.

    def get_torch_profiler_activity_str(self) -> str:
        return "TORCH_CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    # SGLang asks for these classes after it is fully imported; at this module's import it is not.

    def get_mha_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def get_mla_kv_pool_cls(self):
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

        if hasattr(CpuSRTPlatform, "get_kv_pool_cls"):
            return MLATokenToKVPool

        # before that, SGLang gives it an argument that is another pool's
        def make(*args, index_head_dim=None, **options):
            return MLATokenToKVPool(*args, **options)

        return make

    def get_paged_allocator_cls(self):
        from sgl_prefix_attn.engine.cpu.allocator import make_allocator

        return make_allocator
