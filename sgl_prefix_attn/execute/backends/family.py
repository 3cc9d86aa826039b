"""Which family of kernels a server or wrapper runs: a pure function, also for `doctor`.

A family is kernels and the planner whose words they read. Row tiles are Hopper's (gluon_backend.py,
plan/row_tile_planner.py); packs run on any GPU by Triton and elsewhere in torch (triton_backend.py,
torch_backend.py, plan/), and whatever row tiles can run they can run, too.
"""

from typing import NamedTuple

# As SGL_PREFIX_ATTN_KERNELS names the families; TRITON's words are run by torch on a CPU.
AUTO, ROW_TILES, TRITON = "auto", "row_tiles", "triton"


class Family(NamedTuple):
    """name: ROW_TILES or TRITON; why_not: what stands against row tiles, as a label, or None."""

    name: str
    why_not: str | None = None

    def __str__(self) -> str:
        if self.name == ROW_TILES:
            return "row tiles (Gluon, sm_90)"
        return f"packs (Triton, torch on a CPU), no row tiles ({self.why_not})"


def choose_family(wanted: str, strategy: str, why_not_here: str | None) -> Family:
    """Choose what the prefix steps of a server or wrapper run.

    wanted        AUTO, ROW_TILES or TRITON
    strategy      of the packing: row tiles have but the one, the others are ablations of packs
    why_not_here  why_no_row_tiles() of its device and model

    Raises ValueError when row tiles are wanted and cannot run, or kernels that do not exist.
    """
    if wanted not in (AUTO, ROW_TILES, TRITON):
        raise ValueError(f"kernels must be {AUTO}, {ROW_TILES} or {TRITON}; got {wanted!r}")
    if wanted == TRITON:
        return Family(TRITON, "kernels:triton")
    why_not = why_not_here
    if why_not is None and strategy != "calibrated":
        why_not = f"strategy:{strategy}"
    if why_not is None:
        return Family(ROW_TILES)
    if wanted == ROW_TILES:
        raise ValueError(
            f"kernels, or SGL_PREFIX_ATTN_KERNELS=row_tiles: row tiles cannot run here ({why_not});"
            " let them be chosen, or remove what stands against them"
        )
    return Family(TRITON, why_not)
