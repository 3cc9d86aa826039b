"""Measured cuts of random batches, one JSON object a line; compressed in files named .xz."""

from __future__ import annotations

import lzma
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import orjson

from sgl_prefix_attn.cli.model_heads import parse_heads
from sgl_prefix_attn.plan.row_tile_time import RowTileRates, part_costs, predict_us
from sgl_prefix_attn.plan.row_tiles import B_MASKED, B_UNMASKED, Cut, RowTiles
from sgl_prefix_attn.records import HeadConfig


@dataclass(frozen=True)
class Sample:
    """One cut of one batch, what its time is predicted from, and its microseconds per layer.

    queries, unmasked, masked, parts  of each tile
    """

    gpu: str
    num_sms: int
    heads: str
    head_dim: int
    batch: str
    unique_tokens: int
    queries: list[int]
    unmasked: list[int]
    masked: list[int]
    parts: list[int]
    us: float

    @classmethod
    def of(
        cls, gpu: str, num_sms: int, heads: HeadConfig, batch: str, tokens: int, cut: Cut, us: float
    ) -> Sample:
        tiles = cut.tiles
        return cls(
            gpu, num_sms, f"{heads.num_qo_heads}/{heads.num_kv_heads}", heads.head_dim, batch,
            tokens, np.diff(tiles.edge).tolist(), tiles.blocks[:, B_UNMASKED].tolist(),
            tiles.blocks[:, B_MASKED].tolist(), cut.parts.tolist(), us,
        )  # fmt: skip

    def predicted_us(self, rates: RowTileRates) -> float:
        heads, tiles, parts = self._cut
        costs = part_costs(tiles, heads, rates)
        return predict_us(tiles, costs, parts, self.unique_tokens, heads, self.num_sms, rates)

    @property
    def head_config(self) -> HeadConfig:
        return HeadConfig(*parse_heads(self.heads), self.head_dim)

    @cached_property
    def _cut(self) -> tuple[HeadConfig, RowTiles, np.ndarray]:
        """Heads, tiles (without runs of KV) and parts: made once, as a fit asks some hundred times
        for each sample's time."""
        blocks = np.zeros((len(self.queries), 5), np.int32)
        blocks[:, B_UNMASKED], blocks[:, B_MASKED] = self.unmasked, self.masked
        edge = np.cumsum([0, *self.queries]).astype(np.int32)
        tiles = RowTiles(edge, np.zeros_like(edge), np.zeros((0, 5), np.int32), blocks)
        return self.head_config, tiles, np.array(self.parts)


def write(path: Path, samples: Iterable[Sample]) -> None:
    """Add samples to a file."""
    with _open(path, "ab") as file:
        file.writelines(orjson.dumps(asdict(sample)) + b"\n" for sample in samples)


def read(path: Path) -> list[Sample]:
    """Read a file. Raises ValueError that names it and the line that is no sample."""
    found = []
    try:
        with _open(path, "rb") as file:
            lines = file.readlines()
    except (lzma.LZMAError, EOFError) as error:
        raise ValueError(f"{path}: {error}") from None
    for i, line in enumerate(lines, 1):
        try:
            found.append(Sample(**orjson.loads(line)))
        except (orjson.JSONDecodeError, TypeError) as error:
            raise ValueError(f"{path}, line {i}: {error}") from None
    if not found:
        raise ValueError(f"{path}: no sample in it")
    return found


def _open(path: Path, mode: Literal["rb", "ab"]) -> BinaryIO | lzma.LZMAFile:
    return lzma.open(path, mode) if path.suffix == ".xz" else path.open(mode)
