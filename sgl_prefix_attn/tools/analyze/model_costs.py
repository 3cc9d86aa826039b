"""How long a model takes on a GPU for all but decode attention: a few numbers, all of them rough.

A decode step reads the weights once, at the bandwidth that the calibration of the GPU has, and
takes a fixed time and a little for each request on top. Both were read off
eval/results/engine_h200.json and the engine_h100.json of commit 74d45f8, TPOT less predicted
attention: 4.5 to 5.3 ms on H200 and 6.3 to 7.2 ms on H100, for 4 to 64 requests. Prefill
multiplies, at a share of the data sheet's rate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sgl_prefix_attn.records import HeadConfig
from sgl_prefix_attn.tools.analyze.server_state import Costs
from sgl_prefix_attn.tools.model_heads import size
from sgl_prefix_attn.tools.named_gpus import Gpu

STEP, REQUEST = 1.0e-3, 11.5e-6  # seconds of a decode step, and of each request in it
PREFILL_SHARE = 0.6  # of the GPU's dense rate
POOL_SHARE = 0.86  # of the GPU's memory that SGLang gives to weights and KV
# How long FlashInfer's prefill takes for cached tokens beside FlashAttention 3's, SGLang's default
# on Hopper: the rows of eval/results/multi_token_h200.json in which a request fills a tile.
FLASHINFER_CACHED = 1.8
BYTES = 2  # of an element of KV, and of a weight that is not quantized
# Bits of a weight, with its scales, by quantization methods, or algorithms, that name none.
_BITS = {"fp8": 8.0, "fbgemm_fp8": 8.0, "mxfp4": 4.25, "nvfp4": 4.5}
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")  # as models call them


@dataclass(frozen=True)
class Model:
    """One tensor-parallel rank's part. weights: bytes that a decode step reads; active: weights
    that a token is multiplied with, fewer where there are experts."""

    layers: int
    heads: HeadConfig
    weights: float
    active: float

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of KV for a token."""
        return 2 * BYTES * self.layers * self.heads.num_kv_heads * self.heads.head_dim


def model_of(config: Mapping[str, Any] | None, heads: HeadConfig, tp: int) -> Model:
    """Count a Hugging Face config's weights, without one Llama-3.1-8B's; `heads` are those of one
    of `tp` ranks.

    Raises ValueError naming a field that is no size.
    """
    if config is None:
        return Model(32, heads, weights=BYTES * 7.5e9 / tp, active=7.5e9 / tp)

    def of(name: str) -> int:
        return size(name, config.get(name))

    hidden, layers = of("hidden_size"), of("num_hidden_layers")
    attention = 2 * hidden * heads.head_dim * (heads.num_qo_heads + heads.num_kv_heads) * tp
    named = next((name for name in _EXPERTS if config.get(name)), None)
    experts = of(named) if named else 1
    chosen = of("num_experts_per_tok") if config.get("num_experts_per_tok") else 1
    is_wide = experts > 1 and config.get("moe_intermediate_size")
    wide = of("moe_intermediate_size" if is_wide else "intermediate_size")
    product = 3 * hidden * wide
    rest = hidden * of("vocab_size")
    return Model(
        layers=layers,
        heads=heads,
        weights=(_weight_bytes(config) * layers * (attention + experts * product) + BYTES * rest)
        / tp,
        active=(layers * (attention + min(chosen, experts) * product) + rest) / tp,
    )


def _weight_bytes(config: Mapping[str, Any]) -> float:
    """Return the bytes of a layer's weight: what quantization_config says, of several the fewest;
    BYTES where it says nothing that is known here."""
    said = config.get("quantization_config")
    if not isinstance(said, Mapping):
        return BYTES
    bits: list[Any] = [
        said.get("bits"),
        said.get("w_bit"),
        4 if said.get("load_in_4bit") else None,
        8 if said.get("load_in_8bit") else None,
        *(_BITS.get(str(said.get(name)).lower()) for name in ("quant_method", "quant_algo")),
        *_group_bits(said.get("config_groups")),
    ]
    known = [x / 8 for x in bits if type(x) in (int, float) and 0 < x <= 8 * BYTES]
    return min(known, default=BYTES)


def _group_bits(groups: Any) -> Iterator[Any]:
    """What compressed-tensors says of each group of layers."""
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            yield weights.get("num_bits")


def costs(
    model: Model,
    gpu: Gpu,
    *,
    bandwidth: float,
    most_running: int,
    kv_tokens: int | None,
    step: float | None,
) -> Costs:
    """Return what the simulated server's work takes.

    bandwidth     that the GPU's calibration has, bytes a second
    most_running  requests of a decode step
    kv_tokens     that the pool holds, None: what the memory has room for
    step          seconds of a decode step besides attention, None: as the module says

    Raises ValueError where there is no room for KV.
    """
    if kv_tokens is None:
        kv_tokens = int((POOL_SHARE * gpu.memory - model.weights) / model.kv_bytes)
        if kv_tokens < 1:
            raise ValueError(
                f"{model.weights / 1e9:.0f} GB of weights leave no room for KV on a GPU of "
                f"{gpu.memory / 1e9:.0f} GB: raise --tp, or give --kv-tokens"
            )
    rate = PREFILL_SHARE * gpu.flops
    token_pair = 4.0 * model.layers * model.heads.num_qo_heads * model.heads.head_dim / rate
    return Costs(
        step=model.weights / bandwidth + STEP if step is None else step,
        request=REQUEST if step is None else 0.0,
        token=2 * model.active / rate,
        token_pair=token_pair,
        cached_pair=token_pair,
        kv_tokens=kv_tokens,
        most_running=most_running,
    )


def prefilled_by_flashinfer(costs: Costs, gpu: Gpu) -> Costs:
    """Return what a server takes whose prefill is FlashInfer's, as it is elsewhere by default."""
    slower = FLASHINFER_CACHED if gpu.is_hopper else 1
    return costs._replace(cached_pair=costs.token_pair * slower)
