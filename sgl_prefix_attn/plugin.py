"""SGLang's entry point (group `sglang.srt.plugins`): registers backend name, backend and hooks.

SGLang calls register() in every process, before it parses its arguments, and only logs what it
raises. So problems are raised later: by a hook on SGLang's check of its arguments, and again by the
function that builds the backend.
"""

from __future__ import annotations

import logging
from importlib import metadata

from sgl_prefix_attn import __version__

logger = logging.getLogger(__name__)

BACKEND_NAME = "prefix"
SUPPORTED_SGLANG = ("0.5.17",)

_registered = False


def register() -> None:
    """Make `--attention-backend prefix` known to this process. Idempotent, cheap, no CUDA."""
    global _registered
    if _registered:
        return
    _registered = True

    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.server_args import add_attention_backend_choices

    add_attention_backend_choices([BACKEND_NAME])
    register_attention_backend(BACKEND_NAME)(create)
    problem = version_problem()
    if problem is not None:
        # No hooks on an SGLang that they were not written for; `create` raises if it is reached.
        logger.warning("%s", problem)
        return

    from sgl_prefix_attn.patches import register_all

    register_all()


def version_problem() -> str | None:
    """Why the installed SGLang cannot be used, with what to do, or None."""
    installed = metadata.version("sglang")
    # A local tag (0.5.17+cu130) is another build of the same code.
    if installed.split("+")[0] in SUPPORTED_SGLANG:
        return None
    return (
        f"--attention-backend {BACKEND_NAME}: SGLang {installed} is installed, supported is "
        f"{', '.join(SUPPORTED_SGLANG)}: pip install sglang=={SUPPORTED_SGLANG[-1]}"
    )


def create(runner):
    """Build the attention backend of a ModelRunner.

    A draft model's runner gets the stock backend. Raises RuntimeError for an unsupported SGLang
    or missing hooks, ValueError for an unsupported model or an environment value that is bad or
    not the same on all tensor-parallel ranks.
    """
    problem = version_problem()
    if problem is not None:
        raise RuntimeError(problem)
    from sgl_prefix_attn.backend import PrefixAttnBackend, create_stock
    from sgl_prefix_attn.envs import Settings
    from sgl_prefix_attn.ranks import cpu_group, raise_unless_alike

    settings = Settings.from_env()
    raise_if_unsupported(runner.model_config)
    if runner.is_draft_worker:
        return create_stock(runner)
    raise_unless_alike(settings, cpu_group(runner))
    backend = PrefixAttnBackend(runner, settings)
    if runner.ps.tp_rank == 0:
        logger.info(
            "--attention-backend %s: sgl-prefix-attn %s with %s, stock kernels of %s",
            BACKEND_NAME,
            __version__,
            settings.describe(),
            type(backend.stock).__name__,
        )
        advice = prefill_advice(runner.server_args)
        if advice is not None:
            logger.warning("%s", advice)
    return backend


def prefill_advice(server_args) -> str | None:
    """How to keep the prefill that SGLang would choose for this GPU, if it is a faster one.

    Prefill is the composed FlashInfer's; on Hopper SGLang's default is FlashAttention 3.
    """
    from sglang.srt.utils import is_hopper_with_cuda_12_3

    prefill, _ = server_args.get_attention_backends()
    # With speculative decoding the default is not always FA3.
    if server_args.speculative_algorithm is not None:
        return None
    if prefill != BACKEND_NAME or not is_hopper_with_cuda_12_3():
        return None
    return (
        f"--attention-backend {BACKEND_NAME}: prefill runs on FlashInfer, which is slower on this "
        "GPU than SGLang's default. To keep that: --prefill-attention-backend fa3 "
        f"--decode-attention-backend {BACKEND_NAME}"
    )


def raise_if_unsupported(model_config) -> None:
    """Raise ValueError for a model that the backend cannot serve at all."""
    from sglang.srt.configs.model_config import AttentionArch

    if model_config.attention_arch == AttentionArch.MLA:
        what = "uses multi-head latent attention (MLA)"
    elif model_config.is_encoder_decoder:
        what = "is an encoder-decoder model"
    else:
        return
    architectures = ", ".join(getattr(model_config.hf_config, "architectures", None) or [])
    raise ValueError(
        f"--attention-backend {BACKEND_NAME}: {architectures} {what}; supported are decoder-only "
        "models with multi-head or grouped-query attention. Leave --attention-backend out to take "
        "SGLang's default."
    )
