"""GPUs by name, and what a server on one of them would plan and predict with; needs none here."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from sgl_prefix_attn.records import HeadConfig

if TYPE_CHECKING:
    from sgl_prefix_attn.execute.backends.family import Family
    from sgl_prefix_attn.plan.tiles import TileSet
    from sgl_prefix_attn.predict.record import Calibration
    from sgl_prefix_attn.step.evaluate import TimePredictor


class Gpu(NamedTuple):
    """memory in bytes, flops of dense bfloat16 products a second, as NVIDIA's data sheets say."""

    name: str
    num_sms: int
    capability: tuple[int, int]
    memory: float
    flops: float


# The GPUs that plan.costs has rates of.
GPUS = {
    "H100": Gpu("NVIDIA H100 80GB HBM3", 132, (9, 0), 80e9, 989e12),
    "H200": Gpu("NVIDIA H200", 132, (9, 0), 141e9, 989e12),
    "A100": Gpu("NVIDIA A100-SXM4-80GB", 108, (8, 0), 80e9, 312e12),
}
KERNELS = ("auto", "row_tiles", "triton")


def add_server(parser: argparse.ArgumentParser) -> None:
    """Add --gpu, which names one of GPUS, and --kernels."""
    parser.add_argument("--gpu", choices=GPUS, default="H100", help="the server's (default: H100)")
    parser.add_argument(
        "--kernels", choices=KERNELS, default="auto", help="of prefix steps (default: auto)"
    )


@dataclass(frozen=True)
class Server:
    """What decides about a server's decode batches; tile_set: of packs, None for row tiles, whose
    planner is another."""

    family: Family
    planner: Any
    predictor: TimePredictor
    calibration: Calibration
    tile_set: TileSet | None


def server_on(gpu: Gpu, heads: HeadConfig, kernels: str, strategy: str = "calibrated") -> Server:
    """Choose as engine/build.py does at start, with the shipped calibrations, for bfloat16 and
    pages of one token.

    Raises ValueError where row tiles are asked for and cannot run, for an unknown strategy, and for
    heads that no kernels take: such a server runs stock attention.
    """
    # Not before: these import torch and numba.
    import torch

    from sgl_prefix_attn.execute.backends.choice import (
        backend_class,
        why_no_backend,
        why_no_row_tiles_on,
    )
    from sgl_prefix_attn.execute.backends.family import choose_family
    from sgl_prefix_attn.predict import store
    from sgl_prefix_attn.predict.record import CalibrationKey

    key = CalibrationKey(gpu.name, heads, "bfloat16", 1)
    folders = store.Folders(None, store.SHIPPED)
    calibration = store.find(key, gpu.num_sms, folders=folders).calibration
    why_not = why_no_row_tiles_on(gpu.capability, heads, torch.bfloat16)
    family = choose_family(kernels, strategy, why_not)
    device = torch.device("cuda")
    if stock := why_no_backend(device, heads, torch.bfloat16):
        raise ValueError(
            f"{stock}: such a server runs stock attention; the kernels take "
            f"{backend_class(device).capabilities.describe()}"
        )
    return server_of(family, heads, calibration, strategy)


def server_of(
    family: Family, heads: HeadConfig, calibration: Calibration, strategy: str = "calibrated"
) -> Server:
    """Return what a server of such kernels plans and predicts with, on the calibration's GPU."""
    from sgl_prefix_attn.execute.backends.family import ROW_TILES
    from sgl_prefix_attn.plan import Planner
    from sgl_prefix_attn.plan.row_tile_planner import RowTilePlanner
    from sgl_prefix_attn.plan.tile_defaults import gpu_tile_set
    from sgl_prefix_attn.predict.predictor import Predictor, RowTilePredictor
    from sgl_prefix_attn.predict.row_tile_rates import row_tile_rates

    num_sms = calibration.num_sms
    if family.name == ROW_TILES:
        rates = row_tile_rates(calibration)
        row_tiles = RowTilePlanner(heads, num_sms=num_sms, rates=rates)
        return Server(family, row_tiles, RowTilePredictor(calibration), calibration, None)
    tile_set = gpu_tile_set(num_sms, heads)
    packs = Planner(heads, tile_set=tile_set, strategy=strategy, costs=calibration.costs)
    return Server(family, packs, Predictor(calibration), calibration, tile_set)
