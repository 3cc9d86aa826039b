"""What SGLang's ModelRunner says about a model's attention layers, and why they cannot be run."""

from importlib.util import find_spec

import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

from sgl_prefix_attn.engine import determinism, layer_groups, sglang_config
from sgl_prefix_attn.engine.layer_groups import (
    attention_layers,
    has_unknown_scales,
    is_scaled,
)
from sgl_prefix_attn.engine.reasons import first_of
from sgl_prefix_attn.execute.backends.choice import why_no_backend
from sgl_prefix_attn.records import HeadConfig
from sgl_prefix_attn.step.policy import PLAN_US

# Whose draft models run decode steps of their own, as speculative() names them.
DRAFT_IN_STEPS = ("speculative:EAGLE", "speculative:EAGLE3", "speculative:STANDALONE")
_LINEAR_POOL = "HybridLinearKVPool"
_COMPOSED_POOLS = (_LINEAR_POOL, "SWAKVPool")


def planned_layers(runner) -> list[RadixAttention]:
    """Return the layers that run plans."""
    planned = layer_groups.read(runner).planned
    ids = () if planned is None else planned.layer_ids
    return [layer for layer in attention_layers(runner) if layer.layer_id in ids]


def least_saving_us(runner, passes: int = 1) -> float:
    """Return what a plan must save per layer that serves so many passes of the model: what it costs
    the host."""
    return PLAN_US / (len(planned_layers(runner)) * passes)


def head_config(runner) -> HeadConfig:
    """Return the heads that all planned layers of a supported model have on this rank."""
    planned = layer_groups.read(runner).planned
    assert planned is not None
    return planned.traits.heads


def sinks_dtype(runner) -> torch.dtype | None:
    """Return the dtype of the sinks that all planned layers of a model have, None without sinks."""
    planned = layer_groups.read(runner).planned
    return None if planned is None else planned.traits.sinks


def unsupported_model(runner) -> str | None:
    """Say why no step of this model can run the prefix kernels, or None."""
    pool, groups = _pool_name(_full_pool(runner.token_to_kv_pool)), layer_groups.read(runner)
    readable = pool == ("MLATokenToKVPool" if groups.is_latent else "MHATokenToKVPool")
    return (
        groups.problem
        or _untried_with_drafts(runner)
        or unsupported_server(runner.server_args)
        or (None if readable else f"kv_pool:{pool}")
        or _unread_tree(runner)
        or speculative(runner.server_args)  # the last: without another, chains are verified
    )


def _unread_tree(runner) -> str | None:
    """Say why the tree of a model with several pools will not be readable, or None; what else it
    may be is seen with the first batch (paths/readers.py)."""
    options, pool = sglang_config.options(runner.server_args), runner.token_to_kv_pool
    if _full_pool(pool) is pool:
        return None
    if options.enable_hierarchical_cache:
        return "tree:hicache_components"
    # Until 0.5.21 SWAChunkCache, which has no reader; then a tree that keeps nothing.
    chunks = find_spec("sglang.srt.mem_cache.chunk_cache") is not None
    without_tree = options.disable_radix_cache and type(pool).__name__ == "SWAKVPool"
    return "tree:SWAChunkCache" if chunks and without_tree else None


def why_no_kernels(runner) -> str | None:
    """Say why no kernels here can run the planned layers of a model, or None."""
    planned, device = layer_groups.read(runner).planned, torch.device(runner.device)
    assert planned is not None
    traits = planned.traits
    if traits.latent and device.type == "cuda" and determinism.is_on(runner.server_args):
        return "layers:latent"  # no kernel there runs aligned plans
    if traits.kv_dtype != traits.dtype:
        layers = planned_layers(runner)
        if device.type == "cpu" and any(map(is_scaled, layers)):
            return "kv_scales"  # which torch_native, the fallback, does not know
        if any(map(has_unknown_scales, layers)):
            return "kv_scales"
    return why_no_backend(device, traits.heads, traits.dtype, traits.kv_dtype)


def unsupported_extend(runner) -> str | None:
    """Say why no extend batch of a model that decodes over plans can run one, or None."""
    bidirectional = any(x.attn_type != AttentionType.DECODER for x in attention_layers(runner))
    return "layers:bidirectional" if bidirectional else layer_groups.read(runner).left_out


def unsupported_prompts(runner) -> str | None:
    """Say why batches that extend run no plans where those that verify may, or None.

    Of latent attention SGLang expands most prompts to keys and values of their own, in layers that
    no plan serves; what it leaves absorbed has short cached prefixes.
    """
    return "layers:expanded_prompts" if layer_groups.read(runner).is_latent else None


def keeps_states(runner) -> str | None:
    """Say that a model has layers of linear attention or convolutions, None where it has none: they
    read a prompt by other kernels than they decode with."""
    linear = type(runner.token_to_kv_pool).__name__ == _LINEAR_POOL
    return "layers:linear_attention" if linear else None


def _untried_with_drafts(runner) -> str | None:
    """With speculative decoding, name the first thing that a model has besides plain full
    attention: it was never tried with drafts, so that no layer runs plans. None without one."""
    if speculative(runner.server_args) is None:
        return None
    groups, pool = layer_groups.read(runner), runner.token_to_kv_pool
    if groups.left_out is not None:
        return groups.left_out
    if _full_pool(pool) is not pool:
        return f"kv_pool:{_pool_name(pool)}"
    return "layers:sinks" if sinks_dtype(runner) is not None else None


def _full_pool(pool):
    """Return the pool of full attention within one of several kinds of layers, which passes calls
    for such a layer on to it; else the pool itself. By exact class: derived ones lay KV out
    differently."""
    return pool.full_kv_pool if type(pool).__name__ in _COMPOSED_POOLS else pool


def _pool_name(pool) -> str:
    name = type(pool).__name__
    layout = getattr(pool, "kv_cache_layout", "nhd")
    return name if layout == "nhd" else f"{name}/{layout}"


def speculative(server_args) -> str | None:
    """Name the speculative decoding of a server, whose target model verifies and never decodes."""
    algorithm = sglang_config.options(server_args).speculative_algorithm
    return None if algorithm is None else f"speculative:{algorithm}"


def verifies_chains(server_args) -> bool:
    """Say whether every draft that the target model verifies is a chain, which takes no mask."""
    options = sglang_config.options(server_args)
    return speculative(server_args) in DRAFT_IN_STEPS and options.speculative_eagle_topk == 1


def no_draft_steps(server_args) -> str | None:
    """Say why a draft model has no decode steps that plans could serve; None where it has, and
    without a draft model."""
    options, algorithm = sglang_config.options(server_args), speculative(server_args)
    if algorithm in (None, "speculative:NGRAM"):
        return None
    if getattr(options, "enable_multi_layer_eagle", False):
        return "multi_layer"  # each layer drafts a token, and none decodes
    if algorithm not in DRAFT_IN_STEPS:
        return algorithm
    if not verifies_chains(server_args):
        return "draft_tree"
    return "one_step" if options.speculative_num_steps == 1 else None


def unsupported_server(server_args) -> str | None:
    """Say which option of the server rules prefix kernels out, or None.

    The layout of ranks is asked of the options, too: where SGLang makes a draft model's backends,
    what it says of this process is the draft model's own.
    """
    ranks, given = sglang_config.parallel(), sglang_config.options(server_args)
    attention_ranks = max(ranks.attn_dp_size, getattr(given, "attn_dp_size", None) or 1)
    pipeline_ranks = max(ranks.pp_size, getattr(given, "pp_size", None) or 1)
    reasons = {
        "parallel:context": (
            ranks.dcp_enabled
            or (getattr(given, "attn_cp_size", None) or 1) > 1
            or getattr(given, "enable_prefill_cp", False)
        ),
        # --enable-dp-attention; from 0.5.22 on --attn-dp-size is enough.
        "parallel:dp_attention": attention_ranks > 1 or given.enable_dp_attention,
        # One request's KV pages lie on several ranks (from 0.5.21 on).
        "parallel:kv_cache_sharding": getattr(given, "enable_kv_cache_sharding", False),
        # Its microbatches take turns on one backend, which holds one plan.
        "parallel:pipeline": pipeline_ranks > 1,
        # Both decode with other backend instances than the one that the hook finds.
        "parallel:two_batch_overlap": given.enable_two_batch_overlap,
        "parallel:pdmux": given.enable_pdmux,
        # Never tried: the launches of a plan would be traced.
        "torch_compile": given.enable_torch_compile,
    }
    return first_of(reasons)
