"""Bytes a microsecond that a paged gather of KV reaches, by the GPU's name."""

# H100 and H200 as `sgl-prefix-attn calibrate` measured them for 32/8 heads of 128; A100 and what
# any other GPU is taken for are estimates.
_BANDWIDTHS = {"H100": 2.94e6, "H200": 4.24e6, "A100": 1.7e6}
_OTHER = 1.0e6


def known_bandwidth(gpu_name: str) -> float | None:
    """Return the bandwidth of the first GPU of the table whose name occurs in gpu_name."""
    return next((value for name, value in _BANDWIDTHS.items() if name in gpu_name), None)


def usual_bandwidth(gpu_name: str) -> float:
    """Return known_bandwidth, or what an unknown GPU is taken for."""
    return known_bandwidth(gpu_name) or _OTHER
