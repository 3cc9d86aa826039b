"""What a ModelRunner's decode steps are counted into, by rank and server arguments."""

from sgl_prefix_attn.engine import sglang_config
from sgl_prefix_attn.engine.model_facts import attention_layers
from sgl_prefix_attn.metrics.counters import KvSize, StepCounters
from sgl_prefix_attn.metrics.decode_log import DecodeLog
from sgl_prefix_attn.metrics.exporter import PrometheusExporter


def counters_of(runner) -> StepCounters:
    """Tensor-parallel rank 0 of the first pipeline stage logs and, with --enable-metrics, exports;
    the others run the same steps and only count."""
    ranks = sglang_config.parallel()
    if ranks.tp_rank != 0 or ranks.pp_rank != 0:
        return StepCounters()
    args = sglang_config.options(runner.server_args)
    size = KvSize.of(attention_layers(runner), runner.kv_cache_dtype.itemsize)
    exporter = PrometheusExporter(size) if args.enable_metrics else None
    return StepCounters(exporter, DecodeLog(args.decode_log_interval, size))
