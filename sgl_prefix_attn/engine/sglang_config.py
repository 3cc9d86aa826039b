"""What SGLang was started with, wherever a release keeps it. Branches on what is there.

Imports of SGLang are inside the functions: the hooks load this before SGLang parses arguments.
"""


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


def model_config(server_args):
    """Return SGLang's ModelConfig, before any weights are loaded."""
    if hasattr(server_args, "get_model_config"):  # until 0.5.18
        return server_args.get_model_config()
    from sglang.srt.arg_groups.overrides import model_config_of

    return model_config_of(server_args)
