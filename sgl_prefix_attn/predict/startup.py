"""What a server, and the library, decide and plan by on a GPU: its calibration."""

import logging
from typing import Any

import torch

from sgl_prefix_attn.plan.kernel_rates import KernelRates
from sgl_prefix_attn.predict import store
from sgl_prefix_attn.predict.record import Calibration, CalibrationKey, rates_of
from sgl_prefix_attn.records import FLASHINFER, HeadConfig

logger = logging.getLogger(__name__)


def find_calibration(key: CalibrationKey, num_sms: int) -> Calibration:
    """Find what a server decides by (store.find) and log what it is."""
    found = store.find(key, num_sms)
    level = logging.WARNING if found.warning else logging.INFO
    logger.log(level, "%s", found.message)
    return found.calibration


def gpu_key(
    family: str,
    device: torch.device,
    heads: HeadConfig,
    kv_dtype: torch.dtype,
    page_size: int,
    fallback: str = FLASHINFER,
) -> CalibrationKey:
    """Name what a calibration of this GPU, a family's kernels beside a fallback's and such layers,
    with a KV cache of kv_dtype, is for."""
    kernels: Any = family
    name: Any = str(kv_dtype).removeprefix("torch.")
    gpu = torch.cuda.get_device_name(device)
    return CalibrationKey(gpu, kernels, heads, name, page_size, fallback=fallback)


def default_rates(
    family: str, device: torch.device, heads: HeadConfig, kv_dtype: torch.dtype, page_size: int
) -> KernelRates:
    """Return the rates that a server plans such layers with for a family's kernels: those of its
    calibration (store.find), whatever runs beside them; on a CPU those of an H100."""
    if device.type != "cuda":
        return rates_of(family, heads)()
    key = gpu_key(family, device, heads, kv_dtype, page_size)
    return look_up(key, device).calibration.kernel_rates


def look_up(key: CalibrationKey, device: torch.device) -> store.Found:
    """Find what a server would decide by on this GPU (gpu_key), and log nothing."""
    return store.find(key, torch.cuda.get_device_properties(device).multi_processor_count)
