"""What a server, and the library, decide and plan by on a GPU: its calibration."""

import logging
from typing import Any

import torch

from sgl_prefix_attn.plan.costs import CostModel
from sgl_prefix_attn.plan.row_tile_time import RowTileRates
from sgl_prefix_attn.predict import store
from sgl_prefix_attn.predict.record import Calibration, CalibrationKey
from sgl_prefix_attn.predict.row_tile_rates import row_tile_rates
from sgl_prefix_attn.records import HeadConfig

logger = logging.getLogger(__name__)


def find_calibration(key: CalibrationKey, num_sms: int) -> Calibration:
    """Find what a server decides by (store.find) and log what it is."""
    found = store.find(key, num_sms)
    level = logging.WARNING if found.warning else logging.INFO
    logger.log(level, "%s", found.message)
    return found.calibration


def gpu_key(device: torch.device, heads, dtype: torch.dtype, page_size: int) -> CalibrationKey:
    name: Any = str(dtype).removeprefix("torch.")
    return CalibrationKey(torch.cuda.get_device_name(device), heads, name, page_size)


def default_costs(
    device: torch.device | str,
    heads: HeadConfig,
    dtype: torch.dtype = torch.bfloat16,
    page_size: int = 1,
) -> CostModel:
    """Return what a server with such layers plans with: the costs of its calibration (store.find),
    on a CPU those of plan/costs.py's table."""
    device = torch.device(device)
    if device.type != "cuda":
        return CostModel.for_gpu("cpu", heads, dtype.itemsize)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return store.find(gpu_key(device, heads, dtype, page_size), num_sms).calibration.costs


def default_rates(
    device: torch.device, heads: HeadConfig, dtype: torch.dtype, page_size: int
) -> RowTileRates:
    """Return the rates that a server plans row tiles of such layers with; see default_costs."""
    if device.type != "cuda":
        return RowTileRates()
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return row_tile_rates(store.find(gpu_key(device, heads, dtype, page_size), num_sms).calibration)
