"""What a calibration says about one GPU and one kind of attention layer.

Types and bounds are those of the files, too: predict/codec.py checks what it reads against them.
"""

from dataclasses import dataclass, field
from datetime import date
from typing import Annotated, Literal

from msgspec import Meta

from sgl_prefix_attn.kernels.layout import KERNEL_REVISION
from sgl_prefix_attn.plan.costs import CostModel, GpuRates
from sgl_prefix_attn.plan.estimate import PREFIX_COEFFICIENTS
from sgl_prefix_attn.predict.stock_time import STOCK_COEFFICIENTS
from sgl_prefix_attn.records import HeadConfig

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]


@dataclass(frozen=True)
class CalibrationKey:
    """What a calibration holds for: dtype is torch's name of it, heads are those of one
    tensor-parallel rank, kernels is the KERNEL_REVISION that was measured."""

    gpu: Annotated[str, Meta(min_length=1)]
    heads: HeadConfig
    dtype: Literal["bfloat16", "float16", "float32"]
    page_size: Positive
    # A factory: msgspec leaves a plain default out of what it writes, and takes it for what is not
    # in a file.
    kernels: Positive = field(default_factory=lambda: KERNEL_REVISION)

    @property
    def kv_bytes(self) -> int:
        return 2 if self.dtype in ("bfloat16", "float16") else 4


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
    """Rates that drive the planner, and coefficients of time models that drive the policy.

    versions  name -> version of the packages that time was spent in
    stock     coefficients of FlashInfer's time, as STOCK_COEFFICIENTS names and bounds them
    prefix    of a plan's, as PREFIX_COEFFICIENTS does
    samples   measured batches that the coefficients were fitted to, 0: of other heads or none
    errors    "stock", "prefix" -> root mean square of log(predicted / measured), on batches that
              the fit had not seen; empty where that is not known
    origin    what rates and coefficients were measured with, of other heads too; None: nothing was
    source    measured | shipped | scaled | conservative, see store.find

    Raises ValueError for coefficients that are missing or out of bounds, and for errors or samples
    without what they come from.
    """

    key: CalibrationKey
    versions: dict[str, str]
    num_sms: Positive
    rates: GpuRates
    stock: dict[str, float]
    prefix: dict[str, float]
    samples: Count
    errors: dict[Literal["stock", "prefix"], Annotated[float, Meta(ge=0)]]
    origin: Origin | None
    source: Literal["measured", "shipped", "scaled", "conservative"]

    def __post_init__(self):
        _check("stock", self.stock, STOCK_COEFFICIENTS)
        _check("prefix", self.prefix, PREFIX_COEFFICIENTS)
        if len(self.errors) == 1:
            raise ValueError(f"errors of {', '.join(self.errors)} alone")
        if self.errors and not self.samples:
            raise ValueError(f"no samples, but errors {self.errors}")
        if self.samples and self.origin is None:
            raise ValueError(f"{self.samples} samples without an origin")

    @property
    def costs(self) -> CostModel:
        return CostModel.from_rates(self.rates, self.key.heads, self.key.kv_bytes)


def _check(name: str, given: dict[str, float], table: tuple) -> None:
    if list(given) != [coefficient for coefficient, *_ in table]:
        raise ValueError(f"{name}: coefficients {list(given)} are not this version's")
    for coefficient, _, low, high in table:
        if not low <= given[coefficient] <= high:
            raise ValueError(f"{name} {coefficient} = {given[coefficient]} not in {low} to {high}")
