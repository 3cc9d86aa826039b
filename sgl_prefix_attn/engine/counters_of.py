"""What a ModelRunner's decode steps are counted into, by rank and server arguments."""

from sgl_prefix_attn.engine import sglang_config
from sgl_prefix_attn.engine.layer_groups import is_latent
from sgl_prefix_attn.metrics.counters import KvSize, StepCounters
from sgl_prefix_attn.metrics.decode_log import DecodeLog
from sgl_prefix_attn.metrics.exporter import PrometheusExporter


def counters_of(runner, layers) -> StepCounters:
    """Make the counters; bytes are those of the given attention layers. Tensor-parallel rank 0 of
    the first pipeline stage logs and, with --enable-metrics, exports; the others run the same steps
    and only count."""
    ranks = sglang_config.parallel()
    if ranks.tp_rank != 0 or ranks.pp_rank != 0:
        return StepCounters()
    args = sglang_config.options(runner.server_args)
    latent = any(is_latent(runner, layer) for layer in layers)
    size = KvSize.of(layers, runner.kv_cache_dtype.itemsize, latent)
    exporter = None
    if args.enable_metrics:
        labels = sglang_config.metric_labels(runner.server_args)
        exporter = PrometheusExporter(size, labels=labels)
    return StepCounters(exporter, DecodeLog(args.decode_log_interval, size))
