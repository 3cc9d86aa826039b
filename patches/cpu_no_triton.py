"""CPU platform only: SGLang's other host index helpers in torch instead of Triton."""

TARGET = "sglang.srt.utils.common.support_triton"
TYPE = "replace"
PARAMETERS = ("backend",)
WHY = "without a GPU, write_cache_indices and compute_position must not use Triton"


def hook(backend: str) -> bool:
    """Answer support_triton(backend) with no; SGLang's own no is for two backend names only."""
    return False
