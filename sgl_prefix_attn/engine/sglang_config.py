"""What SGLang was started with, wherever a release keeps it. Branches on what is there.

Imports of SGLang are inside the functions: the hooks load this before SGLang parses arguments.
"""

_SOURCE = "sgl_prefix_attn"  # of what is settled, for SGLang's record
_CHOSEN = "_prefix_attn_chosen"  # SGLang's own choice, where `attention_backend` names another


def parallel():
    """Return this process's place among all: tp_rank, tp_size, tp_group, pp_rank, pp_size,
    attn_dp_size, dcp_enabled."""
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()


def options(server_args):
    """Return the server's options as resolved; from 0.5.19 on the record keeps what was given."""
    from sglang.srt.arg_groups.overrides import resolved_view

    return resolved_view(server_args)


def attention_backends(server_args) -> tuple[str, str]:
    """Return the names of the prefill and the decode backend."""
    from sglang.srt.arg_groups.overrides import attention_backends_of

    return attention_backends_of(options(server_args))


def prefill_graph(server_args) -> str | None:
    """Return the kind of CUDA graph that extend batches run in, None where SGLang tells none."""
    config = getattr(options(server_args), "cuda_graph_config", None)
    return config and config.prefill.backend


def metric_labels(server_args) -> dict[str, object]:
    """Return the labels that SGLang's scheduler gives to its own metrics in this process; until
    0.5.20 without dp_rank, which only the scheduler itself knows there."""
    from sglang.srt.disaggregation.utils import DisaggregationMode

    given, ranks = options(server_args), parallel()
    switches = getattr(given, "enable_pd_role_switch", False)
    engine = DisaggregationMode.to_engine_type(given.disaggregation_mode)
    labels = {
        "model_name": given.served_model_name,
        "engine_type": "dynamic" if switches else engine,
        "tp_rank": ranks.tp_rank,
        "pp_rank": ranks.pp_rank,
        "moe_ep_rank": ranks.moe_ep_rank,
    }
    if (dp_rank := getattr(ranks, "dp_rank", None)) is not None:
        labels["dp_rank"] = dp_rank
    return labels | (given.extra_metric_labels or {})


def default_backend(server_args) -> str:
    """Return the name of the backend that SGLang chose for the model, or was told to take, before
    prefix attention got its part of the batches (start_checks.ask_for_decode)."""
    return getattr(server_args, _CHOSEN, None) or options(server_args).attention_backend


def has_chunked_prefix_cache(backend: str) -> bool:
    """Whether SGLang lets a backend expand the cached prefixes of latent attention in chunks."""
    from sglang.srt.server_args import CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS

    return backend in CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS


def name_one_backend(server_args) -> None:
    """Until 0.5.18, where prefill and decode name one backend, have SGLang build that one: it goes
    by `attention_backend` then, whatever they name."""
    from sglang.srt.arg_groups import overrides

    prefill, decode = attention_backends(server_args)
    if prefill == decode and not hasattr(overrides, "declare_resolution"):
        object.__setattr__(server_args, _CHOSEN, default_backend(server_args))
        settle(server_args, attention_backend=prefill)


def settle(server_args, **values) -> None:
    """Settle options while SGLang resolves its own, or after that."""
    from sglang.srt.arg_groups import overrides

    if hasattr(overrides, "declare_resolution"):  # from 0.5.19 on
        overrides.declare_resolution(server_args, _SOURCE, **values)
    elif not getattr(server_args, "_declarations_materialized", False):  # still resolving
        for name, value in values.items():
            setattr(server_args, name, value)
    elif hasattr(server_args, "_late_resolution"):  # 0.5.18
        server_args._late_resolution(_SOURCE, **values)
    else:
        server_args.override(_SOURCE, **values)


def model_config(server_args):
    """Return SGLang's ModelConfig, before any weights are loaded."""
    if hasattr(server_args, "get_model_config"):  # until 0.5.18
        return server_args.get_model_config()
    from sglang.srt.arg_groups.overrides import model_config_of

    return model_config_of(server_args)
