"""What a server would do with a model, before any weights are loaded: read from the model's config
by SGLang's own reading of it. The server asks the layers themselves (engine/stock_alone.py)."""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from sgl_prefix_attn.engine import fallback, sglang_config
from sgl_prefix_attn.engine.layer_groups import (
    CHUNK,
    FULL,
    WINDOW,
    LayerGroups,
    LayerTraits,
    divide,
)
from sgl_prefix_attn.engine.start_checks import raise_if_unsupported
from sgl_prefix_attn.ranges import in_short
from sgl_prefix_attn.settings import Settings

# What transformers calls layers that attend to less than everything.
_WINDOWS = {"sliding_attention": WINDOW, "chunked_attention": CHUNK}
_LINEAR = "linear attention"


class Outlook(NamedTuple):
    """What a server would do with a model.

    unread   why SGLang reads no model from the config, "" where it does
    refused  why it does not start, "" where it does
    stock    why every step runs SGLang's own backend, as a label of metrics, "" where the config
             names nothing
    layers   what each group of layers runs where some run plans, "" where none can
    planned  the layers that run plans, None where none can
    traits   each kind of attention layer
    """

    unread: str = ""
    refused: str = ""
    stock: str = ""
    layers: str = ""
    planned: LayerTraits | None = None
    traits: tuple[LayerTraits, ...] = ()


def outlook(folder: Path, tp: int) -> Outlook:
    """Look at the model in a folder, on a rank of so many."""
    from sglang.srt.configs.model_config import ModelConfig

    try:
        config = ModelConfig(str(folder))
    except Exception as error:  # of any type
        return Outlook(unread=f"SGLang reads no model from it: {type(error).__name__}: {error}")
    try:
        raise_if_unsupported(config)
        kinds = layer_kinds(config)
    except Exception as error:  # of any type, where SGLang reads the config's details
        return Outlook(refused=str(error) or type(error).__name__)
    kv_dtype = _kv_dtype(config)
    groups = divide(
        {i: _traits(config, kind, tp, kv_dtype) for i, kind in enumerate(kinds) if kind != _LINEAR}
    )
    linear = [i for i, kind in enumerate(kinds) if kind == _LINEAR]
    planned, traits = groups.planned, tuple(group.traits for group in groups.every)
    problem = groups.problem or _sparse(config)
    if planned is None or problem:
        return Outlook(stock=problem, traits=traits)
    return Outlook(layers=_layers(groups, linear), planned=planned.traits, traits=traits)


def layer_kinds(config: Any) -> list[str]:
    """Say what each layer of a model attends to, by its ModelConfig."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    named = list(getattr(config.hf_text_config, "layer_types", None) or ())
    kinds = [FULL] * config.num_hidden_layers
    for i, name in enumerate(named[: len(kinds)]):
        kinds[i] = _WINDOWS.get(name, FULL)
    if config.is_hybrid_swa:  # Llama 4 and MiMo name no kinds of layers
        for i in config.swa_attention_layer_ids or ():
            kinds[i] = CHUNK if kinds[i] == CHUNK else WINDOW
    if (hybrid := mambaish_config(config)) is not None:
        full = set(hybrid.full_attention_layer_ids)
        kinds = [kind if i in full else _LINEAR for i, kind in enumerate(kinds)]
    return kinds


def _kv_dtype(config: Any) -> torch.dtype:
    """The dtype that SGLang gives a model's KV cache where no option names one."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.weight_utils import get_quant_config

    if config.quantization is None:
        return config.dtype
    try:
        quantized = get_quant_config(config, LoadConfig(), {})
    except Exception:  # where it asks more of the machine than this question needs
        return config.dtype
    algorithm = getattr(quantized, "kv_cache_quant_algo", None)
    return torch.float8_e4m3fn if str(algorithm).upper() == "FP8" else config.dtype


def _traits(config: Any, kind: str, tp: int, kv_dtype: torch.dtype) -> LayerTraits:
    window, kv_heads = kind == WINDOW, config.get_num_kv_heads
    said = config.hf_text_config
    head_dim, v_head_dim = config.head_dim, config.v_head_dim
    if (rank := getattr(config, "kv_lora_rank", None)) is not None:  # absorbed
        head_dim, v_head_dim, kv_heads = rank + config.qk_rope_head_dim, rank, lambda tp: 1
    elif window:
        head_dim, v_head_dim = config.swa_head_dim, config.swa_v_head_dim
        kv_heads = config.get_swa_num_kv_heads
    return LayerTraits(
        kind=kind,
        window=-1,
        num_qo_heads=config.get_num_attention_heads(tp),
        num_kv_heads=kv_heads(tp),
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        latent=rank is not None,
        dtype=config.dtype,
        kv_dtype=kv_dtype,
        sinks=torch.bfloat16 if config.has_attention_sinks else None,
        # as Grok's configs say it
        transforms=(getattr(said, "attn_temperature_len", None) or -1) > 0
        or getattr(said, "attn_logit_softcapping_method", "tanh") != "tanh",
    )


def _sparse(config: Any) -> str:
    """Name the pool of a model that attends to few tokens, chosen anew for each, or ""."""
    from sglang.srt.configs.model_config import is_deepseek_dsa

    return "kv_pool:DSATokenToKVPool" if is_deepseek_dsa(config.hf_config) else ""


def _layers(groups: LayerGroups, linear: list[int]) -> str:
    runs = [f"{groups.planned} run plans"]
    runs += [f"{group} stock attention ({group.reason})" for group in groups.left]
    runs += [f"layers {in_short(linear)} SGLang's linear attention"] * bool(linear)
    return ", ".join(runs)


def fallback_of(found: Outlook, default: str) -> fallback.Fallback:
    """Name the backend that decodes beside plans on a GPU, and why it is this one, for a server
    whose SGLang chooses `default`. Raises ValueError as the server does, also for settings."""
    return fallback.choose(Settings.from_env().fallback, default, True, found.traits)


def sglangs_choice(folder: Path, tp: int) -> str:
    """Name the backend that SGLang chooses for the model on this machine, as it resolves arguments
    without the plugin's; "" where it asks more of the machine than this question needs."""
    from sglang.srt.server_args import ServerArgs

    try:
        args = ServerArgs(model_path=str(folder), tp_size=tp, skip_tokenizer_init=True)
        if hasattr(args, "resolve_once"):  # until 0.5.18 they are resolved by now
            args.resolve_once()
        return sglang_config.default_backend(args)
    except Exception:
        return ""
