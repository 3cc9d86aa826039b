"""SGLang's entry point (group `sglang.srt.plugins`): registers backend name, backend and hooks.

SGLang calls register() in every process, before it parses its arguments, and only logs what it
raises. So problems are raised later: by a hook on SGLang's check of its arguments, and again by the
function that builds the backend.
"""

import functools
import logging

from sgl_prefix_attn import __version__
from sgl_prefix_attn.plugin import versions
from sgl_prefix_attn.settings import BACKEND_NAME, Settings

logger = logging.getLogger(__name__)


@functools.cache
def register() -> None:
    """Make `--attention-backend prefix` known to this process. Idempotent, cheap, no CUDA."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.server_args import (
        add_attention_backend_choices,
        add_chunked_prefix_cache_attention_backend,
    )

    add_attention_backend_choices([BACKEND_NAME])
    # start_checks.give_prefill turns it off where what SGLang chose for prefill does without
    add_chunked_prefix_cache_attention_backend(BACKEND_NAME)
    register_attention_backend(BACKEND_NAME)(create)
    try:
        sglang = versions.installed()
    except RuntimeError as error:
        # No hooks on an SGLang that they were not written for; `create` raises if it is reached.
        logger.warning("%s", error)
        return

    from sgl_prefix_attn.plugin.hooks import register_all

    register_all(sglang.release)


def create(runner):
    """Build the attention backend of a ModelRunner.

    A draft model's runner gets the fallback alone, and a model that no plan can serve, or whose
    kernels failed at start, what SGLang would have chosen for it. Raises RuntimeError for an
    unsupported SGLang or missing hooks, ValueError for an unsupported model or an environment value
    that is bad or not the same on all tensor-parallel ranks.
    """
    sglang = versions.installed()
    from sgl_prefix_attn.engine import determinism, fallback, sglang_config
    from sgl_prefix_attn.engine.backend import PrefixAttnBackend
    from sgl_prefix_attn.engine.build import NoKernels
    from sgl_prefix_attn.engine.ranks import cpu_group, raise_unless_alike
    from sgl_prefix_attn.engine.start_checks import raise_if_unsupported
    from sgl_prefix_attn.engine.stock_alone import serve_alone, why_stock_alone
    from sgl_prefix_attn.plugin.hooks import verify_applied

    settings = Settings.from_env()
    raise_if_unsupported(runner.model_config)
    if runner.is_draft_worker:
        return fallback.create_stock(runner, fallback.of(runner, settings).name)
    raise_unless_alike(settings, cpu_group())
    verify_applied(sglang)
    reason = why_stock_alone(runner, settings)
    if reason is None:
        try:
            backend = PrefixAttnBackend(runner, settings)
        except NoKernels as none:
            reason = str(none)
    if reason is not None:
        determinism.raise_if_stock_alone(runner.server_args, reason)
        return serve_alone(runner, settings, reason)
    if sglang_config.parallel().tp_rank == 0:
        if not sglang.tried:
            logger.warning(
                "--attention-backend %s: SGLang %s was not tried (supported: %s); all that the "
                "plugin relies on is there, as in %s",
                BACKEND_NAME,
                sglang.version,
                versions.SUPPORTED,
                sglang.release.version,
            )
        prefill, _ = sglang_config.attention_backends(runner.server_args)
        logger.info(
            "--attention-backend %s: sgl-prefix-attn %s with %s, stock decode by %s, prefill by %s",
            BACKEND_NAME,
            __version__,
            settings.describe(),
            backend.fallback,
            prefill,
        )
    return backend
