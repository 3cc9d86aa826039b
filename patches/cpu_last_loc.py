"""CPU platform only: finds the slot of each request's last prefix token without Triton."""

TARGET = "sglang.srt.mem_cache.allocation.get_last_loc_triton"
TYPE = "replace"
PARAMETERS = ("req_to_token",)
WHY = "SGLang takes it for every backend but `torch_native`; without a GPU it cannot run"


def hook(req_to_token, req_pool_indices, prefix_lens):
    """Return the last prefix slots, int64 [B], -1 without a prefix (as get_last_loc_triton).

    req_to_token [R, C], req_pool_indices and prefix_lens [B].
    """
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(req_to_token, req_pool_indices, prefix_lens)
