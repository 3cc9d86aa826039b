"""The offline tile solver: constraints on hand-made reports, and the defaults really compiled."""

import itertools
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import triton

from eval import provenance
from eval.tune import __main__ as command
from eval.tune import constraints, solve
from eval.tune.compiling import Report, Target, loop_spills, report
from eval.tune.gpus import GPUS
from sgl_prefix_attn.plan.tiles import TileConfig
from sgl_prefix_attn.records import HeadConfig

HEADS = HeadConfig(32, 8, 128)
H100 = GPUS["H100"]
GOOD = Report(
    registers=168, spilled=0, loop_spills=0, smem=40_000, tiles_in_flight=2, wgmma=False,
)  # fmt: skip

ONE_CTA = {"smem": 200_000, "tiles_in_flight": 1}  # an SM, with one tile at a time

PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
needs_compiler = pytest.mark.skipif(
    shutil.which(str(PTXAS)) is None, reason="this Triton has no CUDA assembler"
)


def judged(tile=None, heads=HEADS, gpu=H100, dtype="bf16", **changes):
    tile = tile or TileConfig(16, 64, num_warps=4, num_stages=3)
    return constraints.judge(tile, Report(**{**vars(GOOD), **changes}), heads, gpu, dtype)


def names(violations):
    return [name for name, _ in violations]


def test_a_good_tile_is_feasible():
    verdict = judged()
    assert verdict.feasible
    # 65536 registers / (168 * 128 threads), 233472 B of shared memory / 41024
    assert verdict.ctas_per_sm == 3
    assert verdict.in_flight == 132 * 3 * 2 * 64 * 128 * 2


@pytest.mark.parametrize(
    ("changes", "constraint", "why"),
    [
        ({"smem": H100.smem_per_cta + 8}, "1 shared memory", "8 B over"),
        ({"smem": H100.smem_per_cta}, None, ""),
        ({"smem": 200_000}, None, ""),
        ({"smem": 200_000, "gpu": GPUS["A100"]}, "1 shared memory", "B over"),
        ({"registers": 255, "spilled": 64, "loop_spills": 3}, "1 registers", "64 B spilled, 3 t"),
        ({"registers": 168, "spilled": 40, "loop_spills": 0}, None, ""),
        # more registers than an SM has
        ({"tile": TileConfig(128, 64, num_warps=16), "registers": 200}, "1 registers", "per CTA"),
        # L * B / (S * C * t * h * b) = 914550 / (132 * 1 * 1 * 128 * 2)
        (ONE_CTA | {"tile": TileConfig(16, 16, num_warps=4)}, "2 bytes in flight", "n >= 28"),
        (ONE_CTA | {"tile": TileConfig(16, 32, num_warps=4)}, None, ""),
    ],
)
def test_constraints_on_a_report(changes, constraint, why):
    verdict = judged(**changes)
    assert names(verdict.violations) == [constraint] * (constraint is not None)
    assert verdict.feasible or why in verdict.violations[0][1]


def test_spills_are_counted_in_innermost_loops_alone():
    sass = """
        /*0000*/                   STL [R1], R0 ;               /* 0x1 */
        /*0010*/                   LDL R11, [R1+0x1c] ;
        /*0020*/                   LDL.LU R4, [R1] ;
        /*0030*/                   HGMMA.64x32x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0040*/              @!P0 STL.64 [R1+0x8], R6 ;
        /*0050*/               @P0 BRA 0x20 ;
        /*0060*/                   STL [R1], R0 ;
        /*0070*/              @!P1 BRA 0x10 ;
        /*0080*/                   EXIT ;
        /*0090*/                   BRA 0x90 ;
    """
    assert loop_spills(sass) == 2


@pytest.mark.parametrize(
    ("tile", "reason"),
    [
        (TileConfig(8, 64), "m=8"), (TileConfig(16, 8), "n=8"), (TileConfig(24, 64), "m=24"),
        (TileConfig(16, 64, requests=8), "32 rows"), (TileConfig(64, 16, requests=32), "n=16"),
    ],
)  # fmt: skip
def test_mma_bounds_m_and_n_from_below(tile, reason):
    found = constraints.before_compiling(tile, HeadConfig(8, 2, 128), H100)
    assert "3 MMA" in names(found) and any(reason in why for _, why in found)


def test_an_accumulator_larger_than_the_registers_is_not_compiled():
    found = constraints.before_compiling(TileConfig(128, 64, num_warps=1), HEADS, H100)
    assert names(found) == ["1 registers"] and "512 per thread" in found[0][1]
    assert not constraints.before_compiling(TileConfig(128, 64, num_warps=4), HEADS, H100)


def test_a_compiler_refusal_is_a_verdict():
    verdict = constraints.judge(TileConfig(16, 64), "CompilationError: no", HEADS, H100, "bf16")
    assert verdict.violations == [("compiler", "CompilationError: no")]


def test_the_space_holds_the_defaults_of_tails():
    defaults = [tile for tile in solve.default_tiles(H100, HEADS) if tile.requests]
    kinds = {(tile.requests, tile.block_m) for tile in solve.space(defaults)}
    assert {(tile.requests, tile.block_m) for tile in defaults} <= kinds
    assert {(0, m) for m in (16, 32, 64, 128)} <= kinds


@pytest.mark.slow
@needs_compiler
def test_the_defaults_are_feasible_on_an_h100():
    tiles = solve.default_tiles(H100, HEADS)
    assert len(set(tiles)) == len(tiles)
    solution = solve.solve(H100, HEADS, "bf16", tiles)
    assert {v.tile for v in solution.verdicts} == solution.defaults
    for verdict in solution.verdicts:
        assert verdict.feasible, f"{verdict.tile}: {verdict.violations}"
        assert verdict.report.smem > 16 * 128 * 2
        assert 32 < verdict.report.registers <= (verdict.tile.max_regs or 255)


def test_the_command_prints_and_writes_one_table(monkeypatch, tmp_path, capsys):
    """A default that is not feasible is named, and is exit status 1."""
    tile = TileConfig(16, 64, num_warps=4, num_stages=3)
    verdicts = [judged(tile), judged(replace(tile, block_n=32), loop_spills=3)]
    solved = solve.Solution(verdicts, frozenset(v.tile for v in verdicts))
    monkeypatch.setattr(command, "solve", lambda *_, **__: solved)
    assert command.main(["solve", "--json", str(tmp_path / "tiles.json")]) == 1
    printed = capsys.readouterr().out
    assert "1 of 2 configurations" in printed and "a default: shared 16 32 4 3" in printed
    rows = provenance.load(tmp_path / "tiles.json")["rows"]
    assert [row["feasible"] for row in rows] == [True, False]
    assert rows[1]["excluded_by"].startswith("1 registers: ")


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("lengths", ["i32", "i64"])
def test_tails_compile_with_any_warps_and_lengths(lengths):
    """Triton 3.6 once refused the tails kernel with int32 lengths from four warps on."""
    for warps, requests in itertools.product((2, 4), (1, 4)):
        tile = TileConfig(16, 32, num_warps=warps, num_stages=3, requests=requests)
        assert report(tile, Target(90, HEADS, "fp16", lengths)).registers > 0
