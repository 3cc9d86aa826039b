"""What a server checks and settles before it loads any weights."""

import logging
import os

from sgl_prefix_attn.engine import sglang_config
from sgl_prefix_attn.settings import BACKEND_NAME, Settings

logger = logging.getLogger(__name__)

GLUE_GRAPH = "SGLANG_ENABLE_METADATA_GLUE_GRAPH"
PLAN_STREAM = "SGLANG_ENABLE_OVERLAP_PLAN_STREAM"
TREE_CORE = "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"


def keep_default_prefill(server_args) -> None:
    """Make `--attention-backend prefix` alone mean decode, before SGLang resolves its arguments:
    prefill then stays with what SGLang chooses for this GPU and model. A prefill backend that was
    asked for stays, too."""
    if server_args.attention_backend != BACKEND_NAME or server_args.prefill_attention_backend:
        return
    if server_args.decode_attention_backend in (None, BACKEND_NAME):
        server_args.attention_backend = None
        server_args.decode_attention_backend = BACKEND_NAME


def keep_stock_drafts(server_args) -> None:
    """Give the draft model of speculative decoding the stock backend unless another was asked for:
    SGLang refuses to draft with a backend whose name it does not know."""
    names = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    asked = BACKEND_NAME in (getattr(server_args, name) for name in names)
    if not asked or server_args.speculative_algorithm is None:
        return
    if server_args.speculative_draft_attention_backend in (None, BACKEND_NAME):
        server_args.speculative_draft_attention_backend = _stock_drafts(server_args)


def _stock_drafts(server_args) -> str:
    """Name the backend of a draft model: on a Hopper GPU what SGLang chooses there, which needs no
    lengths on the host, unless another prefill backend that was asked for verifies; elsewhere
    FlashInfer."""
    # Not at the top: the hooks load this module before SGLang has imported its own.
    from sglang.srt.utils.common import is_hopper_with_cuda_12_3, is_no_spec_infer_or_topk_one

    prefill = server_args.prefill_attention_backend or server_args.attention_backend
    by_prefill = server_args.speculative_attention_mode == "prefill"
    other = by_prefill and prefill not in (None, "fa3", BACKEND_NAME)
    if not other and is_hopper_with_cuda_12_3() and is_no_spec_infer_or_topk_one(server_args):
        return "fa3"
    return "flashinfer"


def check(server_args) -> None:
    """Refuse what could not work, and see to a radix tree that can be read, where prefix attention
    was asked for. Raises ValueError."""
    if BACKEND_NAME not in sglang_config.attention_backends(server_args):
        return
    Settings.from_env()
    raise_if_unsupported(sglang_config.model_config(server_args))
    _refuse_glue_graph()
    _refuse_plan_stream(server_args)
    _ask_for_a_readable_tree()


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


def _refuse_glue_graph() -> None:
    from sglang.srt.environ import envs

    variable = getattr(envs, GLUE_GRAPH, None)  # from 0.5.19 on
    if variable is not None and variable.get():
        raise ValueError(
            f"--attention-backend {BACKEND_NAME}: {GLUE_GRAPH} would capture the host's planning "
            "into a CUDA graph; unset it"
        )


def _refuse_plan_stream(server_args) -> None:
    """With this variable SGLang fills buffers of the backend that verifies after drafting, which
    neither FlashInfer's backend nor ours has."""
    from sglang.srt.environ import envs

    if not getattr(envs, PLAN_STREAM).get():
        return
    prefill, decode = sglang_config.attention_backends(server_args)
    options = sglang_config.options(server_args)
    verifies = decode if options.speculative_attention_mode == "decode" else prefill
    if options.speculative_algorithm is not None and verifies == BACKEND_NAME:
        raise ValueError(
            f"--attention-backend {BACKEND_NAME} cannot verify drafts with {PLAN_STREAM}; unset it"
        )


def _ask_for_a_readable_tree() -> None:
    """Ask for the tree core in Python where the default one shows no paths (SGLang 0.5.21)."""
    from sglang.srt.environ import envs

    variable = getattr(envs, TREE_CORE, None)
    if variable is None or variable.is_set() or variable.get() == "python":
        return
    from sglang.srt.mem_cache.unified_cache import unified_tree_core_interface as interface

    if not hasattr(interface.UnifiedTreeCoreInterface, "collect_path_info"):
        os.environ[TREE_CORE] = "python"
        logger.info(
            "--attention-backend %s: %s=python, because this SGLang's Rust core does not show "
            "which prefixes requests share",
            BACKEND_NAME,
            TREE_CORE,
        )
