"""What a calibration says about one GPU and one kind of attention layer.

Types and bounds are those of the files, too: predict/codec.py checks what it reads against them.
"""

from dataclasses import dataclass, field, fields
from datetime import date
from typing import Annotated, Literal

from msgspec import Meta

from sgl_prefix_attn.kernels.words import KERNEL_REVISION
from sgl_prefix_attn.plan.kernel_rates import KernelRates, LatentRates, PortableRates
from sgl_prefix_attn.predict.stock_time import STOCK_COEFFICIENTS, KvCosts
from sgl_prefix_attn.records import FLASHINFER, HeadConfig

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Rate = Annotated[float, Meta(gt=0)]
Kernels = Literal["hopper", "portable"]
Source = Literal["judged", "measured", "shipped", "scaled", "conservative"]
_BYTES = {"float8_e4m3fn": 1, "bfloat16": 2, "float16": 2, "float32": 4}
# The rates of each family's kernels; without arguments those fitted on an H100.
RATES: dict[str, type[KernelRates]] = {"hopper": KernelRates, "portable": PortableRates}


def rates_of(family: str, heads: HeadConfig) -> type[KernelRates]:
    """Return the kind of rates that a family's kernels for such heads have."""
    return LatentRates if heads.latent_dim else RATES[family]


@dataclass(frozen=True)
class CalibrationKey:
    """What a calibration holds for: family is that of the kernels that were measured, fallback
    SGLang's name of the backend beside them, heads are those of one tensor-parallel rank, dtype is
    torch's name of the KV cache's, kernels is the KERNEL_REVISION that was measured."""

    gpu: Annotated[str, Meta(min_length=1)]
    family: Kernels
    heads: HeadConfig
    dtype: Literal["bfloat16", "float16", "float32", "float8_e4m3fn"]
    page_size: Positive
    # A factory: a plain default is left out of what is written, and taken for what is not in a
    # file (codec.py).
    kernels: Positive = field(default_factory=lambda: KERNEL_REVISION)
    # Left out of what is written, and taken for what is not in a file.
    fallback: Annotated[str, Meta(min_length=1)] = FLASHINFER

    @property
    def kv_bytes(self) -> int:
        """Bytes of an element of the KV cache."""
        return _BYTES[self.dtype]


@dataclass(frozen=True)
class Origin:
    """The measured batches: what batches.draw was given, and the day (UTC) on which measuring
    began."""

    seed: Count
    batches: Positive
    pool_tokens: Positive
    date: date

    def __str__(self) -> str:
        return f"{self.batches} batches of seed {self.seed} on {self.date}"


@dataclass(frozen=True)
class Calibration:
    """What predicts the times of the fallback's decode and of plans, and drives the planner.

    versions   name -> version of the packages that time was spent in
    bandwidth  bytes/us of a paged gather
    stock      coefficients of the fallback's time, as STOCK_COEFFICIENTS names and bounds them
    rates      those of the family's kernels, by the names of KernelRates' fields
    samples    measured batches that the coefficients were fitted to, 0: of other heads or none
    errors     "stock", "prefix" -> root mean square of log(predicted / measured), on what the fit
               had not seen; without those that are not known
    origin     what bandwidth and coefficients were measured with, of other heads too; None: nothing
               was
    source     judged | measured | shipped | scaled | conservative, see store.find

    Raises ValueError for coefficients and rates that are missing or out of bounds.
    """

    key: CalibrationKey
    versions: dict[str, str]
    num_sms: Positive
    bandwidth: Rate
    stock: dict[str, float]
    rates: dict[str, Rate]
    samples: Count
    errors: dict[Literal["stock", "prefix"], Annotated[float, Meta(ge=0)]]
    origin: Origin | None
    source: Source

    def __post_init__(self):
        if list(self.stock) != [name for name, *_ in STOCK_COEFFICIENTS]:
            raise ValueError(f"stock: coefficients {list(self.stock)} are not this version's")
        for name, _, low, high in STOCK_COEFFICIENTS:
            if not low <= self.stock[name] <= high:
                raise ValueError(f"stock {name} = {self.stock[name]} not in {low} to {high}")
        if list(self.rates) != [rate.name for rate in fields(KernelRates)]:
            raise ValueError(f"rates: {list(self.rates)} are not this version's")

    @property
    def kernel_rates(self) -> KernelRates:
        """The rates as the planner takes them."""
        return rates_of(self.key.family, self.key.heads)(**self.rates)

    @property
    def kv_costs(self) -> KvCosts:
        return KvCosts.of(self.bandwidth, self.key.heads, self.key.kv_bytes)
