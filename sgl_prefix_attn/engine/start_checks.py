"""What a server checks and settles before it loads any weights."""

import logging
import os
from contextlib import contextmanager

from sgl_prefix_attn.engine import determinism, sglang_config
from sgl_prefix_attn.engine.cpu import platform
from sgl_prefix_attn.engine.reasons import first_of
from sgl_prefix_attn.settings import BACKEND_NAME, Settings

logger = logging.getLogger(__name__)

GLUE_GRAPH = "SGLANG_ENABLE_METADATA_GLUE_GRAPH"
PLAN_STREAM = "SGLANG_ENABLE_OVERLAP_PLAN_STREAM"
TREE_CORE = "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"


def ask_for_decode(server_args) -> bool:
    """Leave only decode to prefix attention, before SGLang resolves its arguments, and return
    whether prefill was asked of it, too (give_prefill).

    `--attention-backend prefix` alone means decode. Prefill, and what no plan can serve, then stay
    with what SGLang chooses for this GPU and model; a backend that was asked for stays, too.
    """
    every, decode = server_args.attention_backend, server_args.decode_attention_backend
    prefill = server_args.prefill_attention_backend
    if every == BACKEND_NAME:
        server_args.attention_backend = None
        if decode is None:
            server_args.decode_attention_backend = BACKEND_NAME
        elif decode != BACKEND_NAME and prefill is None:
            prefill = BACKEND_NAME  # all but decode was asked for
    if BACKEND_NAME in (every, decode) and platform.is_active():
        determinism.choose_on_a_cpu(server_args)
    if prefill != BACKEND_NAME:
        return False
    server_args.prefill_attention_backend = None
    return True


def give_prefill(server_args) -> None:
    """Give prefill to prefix attention, after SGLang has chosen what it would have run. The limits
    of that backend stay: stock prefill still runs it."""
    prefill, _ = sglang_config.attention_backends(server_args)
    if not sglang_config.has_chunked_prefix_cache(prefill):
        sglang_config.settle(server_args, disable_chunked_prefix_cache=True)
    sglang_config.settle(server_args, prefill_attention_backend=BACKEND_NAME)
    sglang_config.name_one_backend(server_args)


@contextmanager
def not_named_to_the_model(server_args):
    """Hide the decode backend while SGLang looks at the model.

    Some models' code there knows which of SGLang's backends can run them, and refuses any other
    name, and none beside a prefill backend. What it then chooses serves them by itself
    (stock_alone.py), or what no plan can.
    """
    options = sglang_config.options(server_args)
    hidden = options.decode_attention_backend == BACKEND_NAME
    if hidden:
        prefill = None if options.attention_backend else options.prefill_attention_backend
        shown = None if prefill == BACKEND_NAME else prefill
        sglang_config.settle(server_args, decode_attention_backend=shown)
    try:
        yield
    finally:
        if hidden:
            sglang_config.settle(server_args, decode_attention_backend=BACKEND_NAME)


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
    lengths on the host, unless another prefill backend that was asked for verifies or KV is of
    e5m2, which it does not read; elsewhere FlashInfer."""
    # Not at the top: the hooks load this module before SGLang has imported its own.
    from sglang.srt.utils.common import is_hopper_with_cuda_12_3, is_no_spec_infer_or_topk_one

    prefill = server_args.prefill_attention_backend or server_args.attention_backend
    by_prefill = server_args.speculative_attention_mode == "prefill"
    other = by_prefill and prefill not in (None, "fa3", BACKEND_NAME)
    if other or server_args.kv_cache_dtype == "fp8_e5m2":
        return "flashinfer"
    chains = is_hopper_with_cuda_12_3() and is_no_spec_infer_or_topk_one(server_args)
    return "fa3" if chains else "flashinfer"


def check(server_args) -> None:
    """Refuse what could not work, and see to a radix tree that can be read, where prefix attention
    was asked for. Raises ValueError."""
    prefill, decode = sglang_config.attention_backends(server_args)
    if BACKEND_NAME not in (prefill, decode):
        return
    if decode != BACKEND_NAME:
        raise ValueError(
            f"`{BACKEND_NAME}` cannot prefill beside {decode}, which decodes: give "
            f"--attention-backend {BACKEND_NAME} --prefill-attention-backend {BACKEND_NAME} and no "
            f"other --decode-attention-backend, or leave `{BACKEND_NAME}` out"
        )
    settings = Settings.from_env()
    raise_if_unsupported(sglang_config.model_config(server_args))
    _refuse_fp4(server_args)
    _refuse_adaptive_drafts(server_args)
    _refuse_determinism(server_args, settings)
    _refuse_glue_graph()
    _refuse_plan_stream(server_args)
    _ask_for_a_readable_tree()


def raise_if_unsupported(model_config) -> None:
    """Raise ValueError for a model that the backend cannot serve at all."""
    architectures = ", ".join(getattr(model_config.hf_config, "architectures", None) or [])
    reasons = {
        "is an encoder-decoder model; supported are decoder-only models": (
            model_config.is_encoder_decoder
        ),
        # By the server's arguments, where shown_backend.py does not reach.
        "lays out queries and keys by the backend's name, and knows others alone": (
            "SarvamMLAForCausalLM" in architectures
        ),
    }
    why_not = first_of(reasons)
    if why_not is not None:
        raise ValueError(
            f"--attention-backend {BACKEND_NAME}: {architectures} {why_not}. "
            "Leave --attention-backend out to take SGLang's default."
        )


def _refuse_determinism(server_args, settings: Settings) -> None:
    """SGLang checks this of the backend that it chose, which ours stands beside."""
    options = sglang_config.options(server_args)
    if not determinism.is_on(server_args):
        return
    why_not = determinism.why_not(server_args, settings)
    if why_not is None:
        return
    asked = "--enable-deterministic-inference"
    if options.rl_on_policy_target is not None:
        asked = "--rl-on-policy-target, which asks for deterministic inference,"
    raise ValueError(
        f"{asked} cannot be served with `{BACKEND_NAME}` as attention, prefill or decode backend: "
        f"{why_not}. Leave that out to run "
        f"{options.attention_backend}, or name another that SGLang calls deterministic"
    )


def _refuse_fp4(server_args) -> None:
    """No plan reads FP4, and SGLang checks whether a backend does only where it prefills and
    decodes with the same one: with ours it would start pairs that it refuses otherwise."""
    dtype = sglang_config.options(server_args).kv_cache_dtype
    if "fp4" in dtype:
        raise ValueError(
            f"--attention-backend {BACKEND_NAME} cannot serve --kv-cache-dtype {dtype}; leave one "
            "of the two out"
        )


def _refuse_adaptive_drafts(server_args) -> None:
    """With this option SGLang makes backends past shown_backend.py: a model of latent attention
    would take them for ours, and hand over queries and keys otherwise than they read them."""
    latent = getattr(sglang_config.model_config(server_args), "kv_lora_rank", None) is not None
    if latent and sglang_config.options(server_args).speculative_adaptive:
        raise ValueError(
            f"--attention-backend {BACKEND_NAME}: --speculative-adaptive cannot serve a model with "
            "latent attention; leave one of the two out"
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
