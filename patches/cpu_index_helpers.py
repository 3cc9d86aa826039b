"""CPU platform only: SGLang's host index helpers in torch instead of Triton.

SGLang 0.5.17 takes the Triton helpers for every backend name but `torch_native` and `intel_amx`;
without a GPU there is nothing to run them on.
"""

TARGET = (
    "sglang.srt.utils.common.support_triton",
    "sglang.srt.mem_cache.allocation.get_last_loc_triton",
)
WHY = "without a GPU, write_cache_indices, compute_position and get_last_loc must not use Triton"


def no_triton(backend: str) -> bool:
    """Stands in for support_triton(backend)."""
    return False


def last_loc_in_torch(req_to_token, req_pool_indices, prefix_lens):
    """Stands in for get_last_loc_triton: slot of each request's last prefix token, -1 without one.

    req_to_token [R, C], req_pool_indices and prefix_lens [B]; returns int64 [B].
    """
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(req_to_token, req_pool_indices, prefix_lens)


def register() -> None:
    """Register both replacements with SGLang's HookRegistry."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, replacement in zip(TARGET, (no_triton, last_loc_in_torch), strict=True):
        HookRegistry.register(target, replacement, HookType.REPLACE)
