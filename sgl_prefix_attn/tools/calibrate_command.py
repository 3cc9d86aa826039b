"""`sgl-prefix-attn calibrate`: measure this GPU once, so that the server knows when to share."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sgl_prefix_attn.records import FA3, FLASHINFER, HeadConfig
from sgl_prefix_attn.tools.argument_types import count, seed
from sgl_prefix_attn.tools.exit_status import FAILED
from sgl_prefix_attn.tools.model_heads import add_heads, chosen_heads
from sgl_prefix_attn.tools.named_gpus import add_kernels, family_on
from sgl_prefix_attn.tools.output import text_console

if TYPE_CHECKING:
    from sgl_prefix_attn.predict.record import CalibrationKey
    from sgl_prefix_attn.tools.calibrate.samples import Task

POOL_TOKENS = 450_000
_POOL_STEP = 50_000  # free memory varies a little: an interrupted run must find the same pool again
_MEMORY_SHARE = 0.4


class Gpu(NamedTuple):
    name: str
    num_sms: int
    free_bytes: int
    capability: tuple[int, int]


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "calibrate", help="measure this GPU (minutes); an interrupted run resumes"
    )
    add_heads(parser)
    add_kernels(parser)
    parser.add_argument(
        "--fallback", choices=(FLASHINFER, FA3), default=FLASHINFER,
        help="SGLang's backend beside them, as the server's log names it (default: flashinfer)",
    )  # fmt: skip
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument(
        "--kv-cache-dtype", choices=("auto", "fp8_e4m3"), default="auto",
        help="the server's (default: auto, the model's)",
    )  # fmt: skip
    parser.add_argument("--page-size", type=count, default=1, help="the server's (default: 1)")
    parser.add_argument("--batches", type=count, default=600, help="to measure (default: 600)")
    parser.add_argument("--seed", type=seed, default=0, help="of the batches (default: 0)")
    parser.add_argument(
        "--out", type=Path, help="file to write (default: in the user's cache folder)"
    )
    parser.add_argument("--fresh", action="store_true", help="forget what was measured before")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Return exit status 0, FAILED when measuring or the fit failed. Raises ValueError where it
    cannot start, OSError where it cannot write."""
    # Not before: these import torch and numba.
    from sgl_prefix_attn.predict import store
    from sgl_prefix_attn.predict.record import CalibrationKey
    from sgl_prefix_attn.tools.calibrate import procedure
    from sgl_prefix_attn.tools.calibrate.samples import Task
    from sgl_prefix_attn.tools.calibrate.writing import try_folder, writing

    _, heads = chosen_heads(args, takes_latent=True)
    kv_dtype = _kv_dtype(args, heads)
    gpu = find_gpu((args.fallback,))
    family = family_on(gpu.capability, heads, args.dtype, args.kernels, kv_dtype=kv_dtype)
    if args.batches < procedure.MIN_SAMPLES:
        raise ValueError(f"--batches must be at least {procedure.MIN_SAMPLES}, got {args.batches}")
    kernels: Any = family.name
    key = CalibrationKey(gpu.name, kernels, heads, kv_dtype, args.page_size, fallback=args.fallback)
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
            raise ValueError(
                "this user has no home folder, so there is no cache folder: set XDG_CACHE_HOME "
                "here and for the server, or name a file with --out"
            )
        path = folder / store.file_name(key)
    if path.is_dir():
        raise ValueError(f"--out: {path} is a folder")
    with writing(path):
        try_folder(path)
    console = text_console()
    console.print(f"{gpu.name}, {heads}, KV of {kv_dtype}, pages of {args.page_size}")
    console.print(f"stock: SGLang's {args.fallback}; prefix: {family}")
    try:
        calibrate(task, path, args.fresh, console)
    except (RuntimeError, ValueError) as error:
        print(f"sgl-prefix-attn calibrate: {error}", file=sys.stderr)
        return FAILED
    return 0


def calibrate(task: Task, path: Path, fresh: bool, console: Console) -> None:
    """Measure, fit, write. Raises RuntimeError or ValueError where measuring or fitting fails."""
    from sgl_prefix_attn.tools.calibrate import procedure, report
    from sgl_prefix_attn.tools.calibrate.writing import save

    samples_path = path.with_suffix(".samples.jsonl")
    with progress_bar(console) as progress:
        bar = progress.add_task("measuring", total=task.count)
        procedure.measure(
            task,
            samples_path,
            lambda: new_meter(task.key, task.pool_tokens),
            fresh=fresh,
            say=console.print,
            progress=lambda done: progress.update(bar, completed=done),
        )
    console.print("fitting")
    measured = procedure.read_measured(samples_path)
    held_out = procedure.hold_out(measured)
    for line in report.lines(measured, held_out):
        console.print(line)
    save(procedure.finish(measured, held_out), path)
    console.print(f"written: {path}")


def _kv_dtype(args: argparse.Namespace, heads: HeadConfig) -> Any:
    """Return torch's name of the KV cache's dtype. Raises ValueError for what is not measured."""
    from sgl_prefix_attn.predict.stock_time import measured_beside

    narrow = args.kv_cache_dtype == "fp8_e4m3"
    if narrow and args.dtype != "bfloat16":
        raise ValueError(f"--dtype: over fp8_e4m3 KV bfloat16 is measured, not {args.dtype}")
    if args.fallback not in (known := measured_beside(heads, 1 if narrow else 2)):
        layers = f"{heads}{' with fp8_e4m3 KV' * narrow}"
        raise ValueError(
            f"--fallback: {args.fallback} is not measured over {layers}, but "
            f"{' and '.join(known) or 'nothing'}"
        )
    return "float8_e4m3fn" if narrow else args.dtype


def find_gpu(fallbacks: Sequence[str]) -> Gpu:
    """Look at the first GPU. Raises ValueError without one, or where a backend of SGLang's cannot
    be measured on it."""
    import torch

    from sgl_prefix_attn.tools.calibrate.stock_decode import DECODES

    if not torch.cuda.is_available():
        raise ValueError("torch sees no CUDA GPU; a server without one needs no calibration")
    for name in fallbacks:
        if name not in DECODES:
            raise ValueError(f"{name} is not measured, {' and '.join(DECODES)} are")
        try:
            importlib.import_module(DECODES[name].module)
        except ImportError as error:
            raise ValueError(
                f"{name}, which is measured too, does not import ({error}): "
                "pip install 'sgl-prefix-attn[sglang]'"
            ) from error
    try:
        found = Gpu(
            name=torch.cuda.get_device_name(0),
            num_sms=torch.cuda.get_device_properties(0).multi_processor_count,
            free_bytes=torch.cuda.mem_get_info(0)[0],
            capability=torch.cuda.get_device_capability(0),
        )
    except RuntimeError as error:
        raise ValueError(f"torch cannot use the GPU: {error}") from None
    if FA3 in fallbacks and found.capability[0] != 9:
        raise ValueError(f"{FA3} is measured on Hopper GPUs, where it is SGLang's default")
    return found


def new_meter(key: CalibrationKey, most_tokens: int, fallbacks: Sequence[str] | None = None):
    """Make the BatchMeter of the first GPU, for batches of up to most_tokens."""
    import torch

    from sgl_prefix_attn.tools.calibrate.batches import MAX_BATCH
    from sgl_prefix_attn.tools.calibrate.measure import BatchMeter

    device = torch.device("cuda", 0)
    return BatchMeter(
        key, pool_tokens=most_tokens, max_batch=MAX_BATCH, device=device, fallbacks=fallbacks
    )


def pool_tokens(free_bytes: int, key: CalibrationKey) -> int:
    """Choose the KV tokens of the largest batch; the meter holds twice as many. Raises
    ValueError where too little memory is free."""
    from sgl_prefix_attn.tools.calibrate.measure import min_pool

    least = min_pool(key.page_size)
    per_token = 2 * key.heads.num_kv_heads * key.heads.token_dim * key.kv_bytes
    fits = int(_MEMORY_SHARE * free_bytes // per_token)
    if fits < least:
        raise ValueError(
            f"{free_bytes / 2**30:.1f} GiB of GPU memory are free, calibration needs "
            f"{least * per_token / _MEMORY_SHARE / 2**30:.1f}: stop what else uses the GPU"
        )
    return max(least, min(POOL_TOKENS, fits // _POOL_STEP * _POOL_STEP))


def progress_bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console)
