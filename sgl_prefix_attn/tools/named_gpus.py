"""GPUs by name, and what a server on one of them would plan and predict with; needs none here."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, NamedTuple

from sgl_prefix_attn.execute.backends.family import AUTO, HOPPER, KERNELS, Family, choose_family
from sgl_prefix_attn.records import CALIBRATED, HeadConfig

if TYPE_CHECKING:
    from sgl_prefix_attn.plan.planner import Planner
    from sgl_prefix_attn.predict.predictor import Predictor
    from sgl_prefix_attn.predict.record import Calibration


class Gpu(NamedTuple):
    """memory in bytes, flops of dense bfloat16 products a second, as NVIDIA's data sheets say."""

    name: str
    num_sms: int
    capability: tuple[int, int]
    memory: float
    flops: float

    @property
    def is_hopper(self) -> bool:
        return self.capability == (9, 0)


# The GPUs that predict/bandwidths.py knows.
GPUS = {
    "H100": Gpu("NVIDIA H100 80GB HBM3", 132, (9, 0), 80e9, 989e12),
    "H200": Gpu("NVIDIA H200", 132, (9, 0), 141e9, 989e12),
    "A100": Gpu("NVIDIA A100-SXM4-80GB", 108, (8, 0), 80e9, 312e12),
}


def add_server(parser: argparse.ArgumentParser) -> None:
    """Add --gpu, which names one of GPUS, and --kernels."""
    parser.add_argument("--gpu", choices=GPUS, default="H100", help="the server's (default: H100)")
    add_kernels(parser)


def add_kernels(parser: argparse.ArgumentParser) -> None:
    """Add --kernels."""
    parser.add_argument(
        "--kernels", choices=KERNELS, default=AUTO, help="of prefix steps (default: auto)"
    )


class Server(NamedTuple):
    """What decides about a server's batches."""

    family: Family
    planner: Planner
    predictor: Predictor
    calibration: Calibration


def family_on(
    capability: tuple[int, int],
    heads: HeadConfig,
    dtype: str,
    kernels: str,
    strategy: str = CALIBRATED,
    kv_dtype: str | None = None,
) -> Family:
    """Choose the kernels of a GPU as engine/build.py does at start; dtypes are torch's names, that
    of the KV cache None where it is the model's.

    Raises ValueError where Hopper's are asked for and cannot run, for another strategy with them,
    and for heads that no kernels take: such a server runs stock attention.
    """
    # Not before: these import torch and numba.
    import torch

    from sgl_prefix_attn.execute.backends import choice

    device = torch.device("cuda")
    dtypes = getattr(torch, dtype), getattr(torch, kv_dtype or dtype)
    family = choose_family(kernels, strategy, choice.why_no_hopper_on(capability, heads, *dtypes))
    if stock := choice.why_no_backend(device, heads, *dtypes):
        raise ValueError(
            f"{stock}: such a server runs stock attention; the kernels take "
            f"{choice.capabilities_on(device).describe()}"
        )
    return family


def server_on(gpu: Gpu, heads: HeadConfig, kernels: str, strategy: str = CALIBRATED) -> Server:
    """Choose as a server does, with the shipped calibrations, for bfloat16 and pages of one token.

    Raises ValueError as family_on, and for an unknown strategy.
    """
    from sgl_prefix_attn.predict import store
    from sgl_prefix_attn.predict.record import CalibrationKey

    family = family_on(gpu.capability, heads, "bfloat16", kernels, strategy)
    name: Any = family.name
    key = CalibrationKey(gpu.name, name, heads, "bfloat16", 1)
    folders = store.Folders(None, store.SHIPPED)
    calibration = store.find(key, gpu.num_sms, folders=folders).calibration
    return server_of(family, calibration, strategy)


def server_of(family: Family, calibration: Calibration, strategy: str = CALIBRATED) -> Server:
    """Return what a server with this calibration, which is of the family, plans and predicts
    with."""
    from sgl_prefix_attn.execute.backends.portable_backend import PortableBackend
    from sgl_prefix_attn.plan.planner import Planner
    from sgl_prefix_attn.predict.predictor import Predictor

    heads, num_sms, rates = calibration.key.heads, calibration.num_sms, calibration.kernel_rates
    if family.name == HOPPER:
        planner = Planner(heads, num_sms=num_sms, rates=rates, strategy=strategy)
    else:
        config = PortableBackend.config_for(heads)
        planner = Planner(
            heads, num_sms=num_sms * config.ctas, rates=rates, tile_rows=config.tile_rows,
            strategy=strategy, splits_nodes=PortableBackend.splits_nodes,
        )  # fmt: skip
    return Server(family, planner, Predictor(calibration), calibration)
