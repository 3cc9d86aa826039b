"""`calibrate` on this GPU: a few batches with both families of kernels, and a fit to them."""

import math

import pytest
import torch

from sgl_prefix_attn.execute.backends.choice import why_no_backend, why_no_hopper
from sgl_prefix_attn.predict import startup, store
from sgl_prefix_attn.predict.stock_time import measured_beside
from sgl_prefix_attn.records import FA3, HeadConfig
from sgl_prefix_attn.tools.calibrate import procedure, report
from sgl_prefix_attn.tools.calibrate.batches import MAX_BATCH
from sgl_prefix_attn.tools.calibrate.measure import BatchMeter, min_pool
from sgl_prefix_attn.tools.calibrate.stock_decode import DECODES

pytest.importorskip("flashinfer")
DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("fallback", DECODES)
@pytest.mark.parametrize("family", ["hopper", "portable"])
@pytest.mark.parametrize(
    ("heads", "page_size", "kv_dtype"),
    [
        (HeadConfig(28, 4, 128), 16, torch.bfloat16),
        (HeadConfig(8, 8, 64), 1, torch.bfloat16),
        (HeadConfig(16, 8, 128), 1, torch.float8_e4m3fn),
        (HeadConfig(16, 1, 576, 512), 1, torch.bfloat16),
    ],
)
def test_batches_are_measured_and_their_fit_is_usable(
    heads, page_size, kv_dtype, family, fallback, tmp_path, monkeypatch
):
    """Times are of this GPU's kernels, results are compared (measure.BatchMeter)."""
    if fallback not in measured_beside(heads, kv_dtype.itemsize):
        pytest.skip("not measured over such layers")
    pytest.importorskip(DECODES[fallback].module)
    if fallback == FA3 and torch.cuda.get_device_capability(DEVICE)[0] != 9:
        pytest.skip("FlashAttention 3 is measured on Hopper GPUs")
    monkeypatch.setattr(procedure, "MOST_ERROR", 0.5)  # of so few batches
    served = DEVICE, heads, torch.bfloat16, kv_dtype
    why_not = why_no_hopper(*served) if family == "hopper" else why_no_backend(*served)
    if family == "portable" and heads.latent_dim is not None:
        why_not = "no portable kernels of latent layers"
    if why_not is not None:
        pytest.skip(why_not)
    key = startup.gpu_key(family, DEVICE, heads, kv_dtype, page_size, fallback)
    num_sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    pool = min_pool(page_size)
    task = procedure.Task(key, num_sms, store.versions(), 0, procedure.MIN_SAMPLES, pool)
    path = tmp_path / "samples.jsonl"
    procedure.measure(
        task,
        path,
        lambda: BatchMeter(key, pool_tokens=pool, max_batch=MAX_BATCH, device=DEVICE),
    )
    measured = procedure.read_measured(path)
    assert sum(map(len, measured.cuts)) > 2 * len(measured.batches)
    held_out = procedure.hold_out(measured)
    found = procedure.finish(measured, held_out)
    assert all(math.isfinite(error) and error < 0.5 for error in found.errors.values())
    print(*report.lines(measured, held_out), sep="\n")
