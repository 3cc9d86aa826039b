"""What a calibration says about one GPU and one kind of attention layer."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_prefix_attn.plan.costs import CostModel, GpuRates
from sgl_prefix_attn.predict.time_model import TimeModel
from sgl_prefix_attn.records import HeadConfig


@dataclass(frozen=True)
class CalibrationKey:
    """What a calibration holds for: dtype is torch's name of it, "bfloat16" or "float16"; heads
    are those of one tensor-parallel rank."""

    gpu: str
    heads: HeadConfig
    dtype: str
    page_size: int

    @property
    def kv_bytes(self) -> int:
        return 2 if self.dtype in ("bfloat16", "float16") else 4


@dataclass(frozen=True)
class Origin:
    """The measured batches: what batches.draw was given, and the day (UTC, "2026-11-21") on which
    measuring began."""

    seed: int
    batches: int
    pool_tokens: int
    date: str

    def __str__(self) -> str:
        return f"{self.batches} batches of seed {self.seed} on {self.date}"


@dataclass(frozen=True)
class Calibration:
    """Rates that drive the planner, and time models that drive the policy.

    versions  name -> version of every package whose kernels were measured
    samples   measured batches that the models were fitted to, 0: of other heads or none
    errors    "stock", "prefix" -> root mean square of log(predicted / measured), on batches that
              the fit had not seen; empty without samples
    origin    what rates and coefficients were measured with, of other heads too; None: nothing was
    source    measured | shipped | scaled | conservative, see store.find
    """

    key: CalibrationKey
    versions: dict[str, str]
    num_sms: int
    rates: GpuRates
    stock: TimeModel
    prefix: TimeModel
    samples: int
    errors: dict[str, float]
    origin: Origin | None
    source: str

    @property
    def costs(self) -> CostModel:
        return CostModel.from_rates(self.rates, self.key.heads, self.key.kv_bytes)
