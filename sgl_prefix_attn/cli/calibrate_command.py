"""`sgl-prefix-attn calibrate`: measure this GPU once, so that the server knows when to share."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sgl_prefix_attn.cli.argument_types import count
from sgl_prefix_attn.cli.exit_status import FAILED, INTERRUPTED, USAGE
from sgl_prefix_attn.cli.model_heads import add_heads, chosen_heads

POOL_TOKENS = 450_000
_POOL_STEP = 50_000  # free memory varies a little: an interrupted run must find the same pool again
_MEMORY_SHARE = 0.4
_ROOM = 1 << 20  # bytes, several times what a calibration and its samples take


class Unusable(Exception):
    """Wrong arguments, or a machine that cannot be calibrated; the message says what to do."""


@dataclass(frozen=True)
class Gpu:
    name: str
    num_sms: int
    free_bytes: int


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "calibrate", help="measure this GPU (minutes); an interrupted run resumes"
    )
    add_heads(parser)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--page-size", type=count, default=1, help="the server's (default: 1)")
    parser.add_argument("--batches", type=count, default=1200, help="to measure (default: 1200)")
    parser.add_argument("--seed", type=int, default=0, help="of the batches (default: 0)")
    parser.add_argument(
        "--out", type=Path, help="file to write (default: in the user's cache folder)"
    )
    parser.add_argument("--fresh", action="store_true", help="forget what was measured before")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Return the exit status: 0; 1 when measuring failed, 2 when it could not start or not write,
    130 when interrupted."""
    console = Console(soft_wrap=True, highlight=False)
    try:
        calibrate(args, console)
        return 0
    except Unusable as error:
        problem, status = str(error), USAGE
    except (RuntimeError, ValueError) as error:
        problem, status = str(error), FAILED
    except BrokenPipeError:
        raise
    except OSError as error:  # the disk is full, say
        kept = "batches measured before are kept: the same command goes on from there"
        problem, status = f"{error}; {kept}", USAGE
    except KeyboardInterrupt:
        problem, status = "interrupted: the same command goes on where it stopped", INTERRUPTED
    print(f"sgl-prefix-attn calibrate: {problem}", file=sys.stderr)
    return status


def calibrate(args: argparse.Namespace, console: Console) -> None:
    try:
        _, heads = chosen_heads(args)
    except ValueError as error:
        raise Unusable(str(error)) from None
    gpu = find_gpu()
    # Not before: these import torch and numba.
    from sgl_prefix_attn.calibrate import procedure, report
    from sgl_prefix_attn.calibrate.samples import Task
    from sgl_prefix_attn.calibrate.writing import save
    from sgl_prefix_attn.predict import store
    from sgl_prefix_attn.predict.record import CalibrationKey

    if args.batches < procedure.MIN_SAMPLES:
        raise Unusable(f"--batches must be at least {procedure.MIN_SAMPLES}, got {args.batches}")
    key = CalibrationKey(gpu.name, heads, args.dtype, args.page_size)
    task = Task(
        key=key,
        num_sms=gpu.num_sms,
        versions=store.versions(),
        seed=args.seed,
        count=args.batches,
        pool_tokens=pool_tokens(gpu.free_bytes, key),
    )
    path = args.out
    if path is None:
        folder = store.cache_folder()
        if folder is None:
            raise Unusable(
                "this user has no home folder, so there is no cache folder: set XDG_CACHE_HOME "
                "here and for the server, or name a file with --out"
            )
        path = folder / store.file_name(key)
    samples_path = path.with_suffix(".samples.jsonl")
    try_writing(path, samples_path)
    console.print(f"{gpu.name}, {heads}, {args.dtype}, pages of {args.page_size}")
    with progress_bar(console) as progress:
        bar = progress.add_task("measuring", total=task.count)
        procedure.measure(
            task,
            samples_path,
            meter_factory(key, task.pool_tokens),
            fresh=args.fresh,
            say=console.print,
            progress=lambda done: progress.update(bar, completed=done),
        )
    measured = procedure.read_measured(samples_path)
    held_out = procedure.hold_out(measured)
    for line in report.lines(measured, held_out):
        console.print(line)
    save(procedure.finish(measured, held_out), path)
    console.print(f"written: {path}")


def find_gpu() -> Gpu:
    """Look at the first GPU. Raises Unusable without one, or without FlashInfer."""
    import torch

    if not torch.cuda.is_available():
        raise Unusable("torch sees no CUDA GPU; a server without one needs no calibration")
    try:
        import flashinfer  # noqa: F401
    except ImportError as error:
        raise Unusable(
            f"FlashInfer, which is measured too, does not import ({error}): "
            "pip install 'sgl-prefix-attn[sglang]'"
        ) from error
    return Gpu(
        name=torch.cuda.get_device_name(0),
        num_sms=torch.cuda.get_device_properties(0).multi_processor_count,
        free_bytes=torch.cuda.mem_get_info(0)[0],
    )


def try_writing(path: Path, samples_path: Path) -> None:
    """Try, before minutes of measuring, that both files can be written. Raises Unusable."""
    from sgl_prefix_attn.calibrate.writing import try_folder

    if path.is_dir():
        raise Unusable(f"cannot write {path}: it is a folder, --out must name a file")
    try:
        try_folder(path, _ROOM)
        if samples_path.exists():
            samples_path.open("ab").close()
    except OSError as error:
        raise Unusable(
            f"cannot write {path}: {error}; name another file with --out, or another cache folder "
            "with XDG_CACHE_HOME, here and for the server"
        ) from None


def meter_factory(key, most_tokens: int) -> Callable:
    """Return (planner, most requests) -> BatchMeter on the first GPU, for batches of up to
    most_tokens."""
    import torch

    from sgl_prefix_attn.calibrate.measure import BatchMeter

    return lambda planner, max_batch: BatchMeter(
        planner,
        dtype=getattr(torch, key.dtype),
        page_size=key.page_size,
        pool_tokens=most_tokens,
        max_batch=max_batch,
        device=torch.device("cuda", 0),
    )


def pool_tokens(free_bytes: int, key) -> int:
    """Choose the KV tokens of the largest batch; the meter holds twice as many. Raises Unusable."""
    from sgl_prefix_attn.calibrate.rates import min_pool

    least = min_pool(key.page_size)
    per_token = 2 * 2 * key.heads.num_kv_heads * key.heads.head_dim * key.kv_bytes
    fits = int(_MEMORY_SHARE * free_bytes // per_token)
    if fits >= max(least, POOL_TOKENS):
        return max(least, POOL_TOKENS)
    if fits < least:
        raise Unusable(
            f"{free_bytes / 2**30:.1f} GiB of GPU memory are free, calibration needs "
            f"{least * per_token / _MEMORY_SHARE / 2**30:.1f}: stop what else uses the GPU"
        )
    return max(least, fits // _POOL_STEP * _POOL_STEP)


def progress_bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console)
