"""What `doctor --model` says before weights are loaded: which kernels a model's steps can run."""

from pathlib import Path

from sgl_prefix_attn.tools.doctor_checks import FAIL, OK, WARN, Check


def check_model(folder: Path, tp: int, gpu: str) -> Check:
    """Read a model's config, which is readable, and ask SGLang what it would choose for it here.

    gpu  its name, "" without one
    """
    # Not before: these import torch and SGLang.
    import torch

    from sgl_prefix_attn.execute.backends.choice import why_no_backend
    from sgl_prefix_attn.plugin.model_outlook import fallback_of, outlook, sglangs_choice

    found = outlook(folder, tp)
    if found.refused:
        return Check("model", FAIL, found.refused, "serve it without --attention-backend prefix")
    stock = found.stock
    if found.planned and not stock and gpu:
        x = found.planned
        stock = why_no_backend(torch.device("cuda"), x.heads, x.dtype, x.kv_dtype) or ""
    backend = (gpu and sglangs_choice(folder, tp)) or "choice for the server's GPU"
    if not stock and not gpu:
        return Check("model", OK, found.layers)
    if not stock:
        try:
            beside = fallback_of(found, backend, gpu)
        except ValueError as error:
            return Check("model", FAIL, str(error), "change or unset what is named here")
        return Check("model", OK, f"{found.layers}; stock decode by SGLang's {beside}")
    detail = f"every step of this model runs SGLang's own {backend} ({stock})"
    return Check("model", WARN, detail, "such a server starts, and gains nothing from the plugin")
