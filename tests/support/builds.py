"""What kernels over words are compiled from without a GPU: both take the same arguments."""

POINTERS = {
    "q": "", "k": "", "v": "", "out": "", "lse": "fp32", "partial_out": "fp16",
    "partial_state": "fp32", "counters": "i32", "words": "i32", "slots": "i32", "keys": "i32",
    "sinks": "",  # of a server's layers; the library's are float32
}  # fmt: skip
SCALARS = ("sm_scale", "logits_soft_cap", "v_scale")
STRIDES = ("stride_q", "stride_k", "stride_v", "stride_out")


def signature_of(
    constants: dict, dtype: str, kv_dtype: str | None = None
) -> tuple[dict, dict, dict]:
    """Return signature, constants and attributes as ASTSource takes them, pointers and strides
    aligned as a server's are; dtype of q, and of the caches without a kv_dtype, as Triton names
    it."""
    invariant = {"partial_out": "fp32"} if constants["INVARIANT"] else {}
    kinds = POINTERS | invariant | dict.fromkeys(("k", "v"), kv_dtype or "")
    signature = {f"{name}_ptr": f"*{kind or dtype}" for name, kind in kinds.items()}
    signature |= dict.fromkeys(STRIDES, "i32")
    signature |= dict.fromkeys(SCALARS, "fp32")
    if not constants["HAS_SINK"]:
        constants = constants | {"sinks_ptr": None}
    signature |= dict.fromkeys(constants, "constexpr")
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, kind in enumerate(signature.values())
        if kind not in ("fp32", "constexpr")
    }
    return signature, constants, aligned
