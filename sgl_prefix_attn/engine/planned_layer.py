"""One layer of a batch that runs a plan, decode or extend, and what its failure may do."""

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from sgl_prefix_attn.engine import sglang_config
from sgl_prefix_attn.execute.executor import PlanExecutor
from sgl_prefix_attn.execute.params import LayerParams


def option_of(kwargs: dict) -> str | None:
    """Name an option that a layer got at run time, which no plan knows; None without one."""
    return min((name for name, value in kwargs.items() if value is not None), default=None)


def write_kv(kv_pool, k, v, layer, forward_batch, save_kv_cache: bool) -> None:
    """Write a batch's own K and V where SGLang wants them, as its backends do."""
    if save_kv_cache and k is not None:
        kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc), k, v)


def padded_output(q: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a layer's output like q [>= rows, Hq, D]. What is behind `rows` is padding, and zero:
    a model may take statistics over all of them."""
    out = torch.empty_like(q)
    out[rows:] = 0
    return out


def attend(
    executor: PlanExecutor, kv_pool, q, layer, seq_lens: torch.Tensor, out: torch.Tensor
) -> None:
    """Run the loaded plan over one layer: q and out [rows, Hq, D], seq_lens int [>= B]."""
    executor.run(
        LayerParams(
            q=q,
            k_cache=kv_pool.get_key_buffer(layer.layer_id),
            v_cache=kv_pool.get_value_buffer(layer.layer_id),
            seq_lens=seq_lens,
            out=out,
            out_lse=None,
            sm_scale=layer.scaling,
            soft_cap=layer.logit_cap,
        )
    )


def must_raise(error: Exception, capturing: bool) -> bool:
    """Tell whether stock attention cannot go on after kernels that failed: in a capture
    (graph_variants.py sees to it), where the CUDA context is lost, and where other ranks would go
    on with plans."""
    return (
        capturing
        or sglang_config.parallel().tp_size > 1
        or isinstance(error, torch.AcceleratorError)
    )
