"""`sgl-prefix-attn calibrate`: which heads, what it refuses, and a whole run on a made-up GPU."""

import errno
import json
import os
import sys
from dataclasses import replace
from unittest.mock import create_autospec

import pytest
import torch

from sgl_prefix_attn.predict import store
from sgl_prefix_attn.predict.record import RATES, CalibrationKey
from sgl_prefix_attn.records import HeadConfig
from sgl_prefix_attn.tools import calibrate_command as command
from sgl_prefix_attn.tools import main
from sgl_prefix_attn.tools.calibrate import measure, samples
from sgl_prefix_attn.tools.model_heads import config_and_heads, heads_on_rank
from tests.support.calibrations import KEY, NUM_SMS, FakeMeter

LLAMA = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
CHATGLM = {"num_attention_heads": 32, "hidden_size": 4096}


@pytest.mark.parametrize(
    ("config", "tp", "heads"),
    [
        (LLAMA, 1, (32, 8, 128)),
        (LLAMA, 4, (8, 2, 128)),
        (LLAMA, 16, (2, 1, 128)),
        (LLAMA | {"head_dim": 64}, 1, (32, 8, 64)),
        (LLAMA | {"head_dim": None}, 1, (32, 8, 128)),
        ({"num_attention_heads": 12, "hidden_size": 768}, 2, (6, 6, 64)),
        ({"num_key_value_heads": None} | {"num_attention_heads": 4, "head_dim": 32}, 1, (4, 4, 32)),
        ({"text_config": LLAMA, "num_attention_heads": 3}, 1, (32, 8, 128)),
        # as gemma-3-4b-it's, which leaves its heads to their defaults
        ({"text_config": {"model_type": "gemma3_text", "hidden_size": 2560}}, 1, (8, 4, 256)),
        # what follows from other fields does so where some are missing
        (CHATGLM | {"model_type": "llama", "num_attention_heads": 64}, 1, (64, 64, 64)),
        (CHATGLM | {"multi_query_group_num": 2}, 1, (32, 2, 128)),
        (CHATGLM | {"multi_query": True}, 1, (32, 1, 128)),
        (LLAMA | {"time_step_limit": [0.0, float("inf")]}, 1, (32, 8, 128)),  # of Mamba layers
    ],
)
@pytest.mark.parametrize("as_folder", [True, False])
def test_heads_of_a_model(config, tp, heads, as_folder, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    assert config_and_heads(tmp_path if as_folder else file, tp)[1] == HeadConfig(*heads)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[]", "config.json is no JSON object"),
        ("{}", "num_attention_heads: use --heads"),
        ('{"num_attention_heads": 32}', "hidden_size"),
        ('{"num_attention_heads": 32, "num_key_value_heads": 5, "head_dim": 64}', "multiple"),
        ('{"num_attention_heads": "32", "hidden_size": 64}', "num_attention_heads must be .* '32'"),
        ('{"num_attention_heads": 32, "hidden_size": "64"}', "hidden_size must be .* '64'"),
        ('{"num_attention_heads": 4, "head_dim": "64"}', "head_dim must be .* '64'"),
        ('{"num_attention_heads": 0, "hidden_size": 64}', "num_attention_heads must be .* got 0"),
        ('{"num_attention_heads": 4, "num_key_value_heads": 0}', "key_value_heads must .* got 0"),
    ],
)
def test_a_config_that_does_not_say(content, reason, tmp_path):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=reason) as error:
        config_and_heads(tmp_path, 1)
    assert str(error.value).startswith("--model: ")


def test_a_model_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="cannot read .*meta-llama.*--heads"):
        config_and_heads(tmp_path / "meta-llama", 1)


@pytest.mark.parametrize(("heads", "tp"), [((32, 8), 3), ((32, 8), 12), ((48, 6), 4)])
def test_heads_that_cannot_be_divided(heads, tp):
    with pytest.raises(ValueError, match=f"--tp {tp}"):
        heads_on_rank(*heads, 128, tp)


@pytest.mark.parametrize(
    ("heads", "name"),
    [((8, 0, 128), "num_kv_heads"), ((0, 8, 128), "num_qo_heads"), ((8, 8, 0), "head_dim")],
)
@pytest.mark.parametrize("tp", [1, 2])
def test_a_zero_is_named_and_never_taken_for_a_copied_head(heads, name, tp):
    with pytest.raises(ValueError, match=f"{name} must be a positive integer, got 0"):
        heads_on_rank(*heads, tp)


def test_pool_of_a_large_a_small_and_a_full_gpu():
    key = CalibrationKey("X", "portable", HeadConfig(32, 8, 128), "bfloat16", 1)
    two_pools = 2 * 4096  # bytes per token
    assert command.pool_tokens(80 << 30, key) == command.POOL_TOKENS
    free = int(333_000 * two_pools / 0.4)
    assert command.pool_tokens(free, key) == 300_000
    assert command.pool_tokens(free + (100 << 20), key) == 300_000, "the same the next time"
    with pytest.raises(ValueError, match="1.0 GiB of GPU memory are free, .* needs 2.5"):
        command.pool_tokens(1 << 30, key)
    least = measure.min_pool(1)
    assert command.pool_tokens(int(least * two_pools / 0.4) + 1, key) == least


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = command.Gpu(KEY.gpu, NUM_SMS, 16 << 30, (9, 0))
    monkeypatch.setattr(command, "find_gpu", lambda *_: found)
    monkeypatch.setattr(command, "new_meter", lambda key, most_tokens: FakeMeter(key))
    monkeypatch.setattr(FakeMeter, "measured", 0)
    monkeypatch.setattr(FakeMeter, "broken_at", None)
    return tmp_path


COMMAND = ["calibrate", "--heads", "32/8", "--tp", "4", "--head-dim", "64", "--batches", "50"]


@pytest.mark.long
def test_a_whole_run_leaves_what_a_server_finds(gpu, capsys):
    assert main.main(COMMAND) == 0
    (path,) = gpu.rglob("*.json")
    found = store.find(KEY, NUM_SMS)
    assert found.calibration.source == "measured" and str(path) in found.message
    assert found.calibration.samples == 50
    assert path.with_suffix(".samples.jsonl").exists()
    text = capsys.readouterr().out
    assert "prefix: Hopper kernels (Gluon, sm_90)" in text and "bandwidth: 2.9e+06" in text
    assert "cuts: predictions err by" in text and "the policy runs prefix kernels in" in text
    assert f"written: {path}" in text


@pytest.mark.parametrize(
    ("capability", "options", "family"),
    [
        ((9, 0), [], "hopper"),
        pytest.param((8, 0), [], "portable", marks=pytest.mark.slow),
        pytest.param((10, 0), [], "portable", marks=pytest.mark.slow),
        pytest.param((9, 0), ["--kernels", "portable"], "portable", marks=pytest.mark.slow),
        pytest.param(
            (9, 0),
            ["--heads", "32/8", "--tp", "1", "--head-dim", "96"],
            "portable",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_is_measured_is_what_a_server_runs(capability, options, family, gpu, monkeypatch):
    found = command.Gpu(KEY.gpu, NUM_SMS, 16 << 30, capability)
    monkeypatch.setattr(command, "find_gpu", lambda *_: found)
    out = gpu / "x.json"
    assert main.main([*COMMAND, *options, "--batches", "40", "--out", str(out)]) == 0
    got = store.load(out)
    assert (got.key.family, got.source) == (family, "measured")
    assert type(got.kernel_rates) is RATES[family]


def test_kernels_that_cannot_run_are_refused(gpu, capsys, monkeypatch):
    found = command.Gpu("NVIDIA A100-SXM4-80GB", 108, 16 << 30, (8, 0))
    monkeypatch.setattr(command, "find_gpu", lambda *_: found)
    assert main.main([*COMMAND, "--kernels", "hopper"]) == 2
    assert "cannot run here (compute:8.0)" in capsys.readouterr().err
    assert main.main(["calibrate", "--head-dim", "512"]) == 2
    assert "head_dim:512: such a server runs stock attention" in capsys.readouterr().err
    assert FakeMeter.measured == 0


def test_the_meter_has_room_for_every_batch(monkeypatch):
    new_meter = create_autospec(measure.BatchMeter)
    monkeypatch.setattr(measure, "BatchMeter", new_meter)
    assert command.new_meter(KEY, 123_456) is new_meter.return_value
    device = torch.device("cuda", 0)
    new_meter.assert_called_once_with(
        KEY, pool_tokens=123_456, max_batch=256, device=device, fallbacks=None
    )


@pytest.mark.long
def test_the_second_run_measures_nothing_and_writes_the_same(gpu, capsys):
    main.main(COMMAND)
    (path,) = gpu.rglob("*.json")
    before = path.read_bytes()
    path.unlink()
    assert main.main(COMMAND) == 0
    assert FakeMeter.measured == 50 and path.read_bytes() == before
    assert main.main([*COMMAND, "--fresh"]) == 0
    assert FakeMeter.measured == 100


@pytest.mark.slow
def test_out_model_dtype_and_pages(gpu):
    (gpu / "config.json").write_text(json.dumps(LLAMA))
    out = gpu / "here" / "x.json"
    options = ["--model", str(gpu), "--out", str(out), "--batches", "40"]
    assert main.main(["calibrate", *options, "--dtype", "float16", "--page-size", "16"]) == 0
    key = store.load(out).key
    assert (key.heads, key.dtype, key.page_size) == (HeadConfig(32, 8, 128), "float16", 16)
    assert (gpu / "here" / "x.samples.jsonl").exists()


def test_an_e4m3_cache_has_a_calibration_of_its_own(gpu):
    out = gpu / "x.json"
    options = ["--kv-cache-dtype", "fp8_e4m3", "--batches", "40", "--out", str(out)]
    assert main.main([*COMMAND, "--head-dim", "128", *options]) == 0
    assert store.load(out).key == replace(KEY, heads=HeadConfig(8, 2, 128), dtype="float8_e4m3fn")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--heads", "32"], "like 32/8"),
        (["--heads", "32/5"], "multiple"),
        (["--heads", "32/8", "--tp", "5"], "--tp 5"),
        (["--batches", "7"], "at least 40"),
        (["--model", "/nowhere"], "cannot read"),
        (["--kv-cache-dtype", "fp8_e4m3", "--dtype", "float16"], "--dtype"),
        (["--kv-cache-dtype", "fp8_e4m3", "--fallback", "fa3"], "--fallback"),
    ],
)
def test_bad_arguments_are_named(options, reason, gpu, capsys):
    assert main.main(["calibrate", *options]) == 2
    assert reason in capsys.readouterr().err
    assert FakeMeter.measured == 0


@pytest.mark.parametrize(("name", "value", "least"), [("--head-dim", 0, 1), ("--seed", -1, 0)])
def test_what_is_no_count_is_refused(name, value, least, capsys):
    with pytest.raises(SystemExit, match="2"):
        main.main(["calibrate", name, str(value)])
    said = f"argument {name}: must be at least {least}, got {value}"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gpu", "lacks"),
    [(False, "no CUDA GPU"), (True, "flashinfer, which is measured too, does not import")],
)
def test_without_a_gpu_or_flashinfer_it_says_so(gpu, lacks, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert main.main(["calibrate"]) == 2
    assert lacks in capsys.readouterr().err


def test_a_wrong_kernel_writes_nothing(gpu, capsys, monkeypatch):
    monkeypatch.setattr(FakeMeter, "broken_at", 30)
    assert main.main(COMMAND) == 1
    assert "differ" in capsys.readouterr().err and not list(gpu.rglob("*.json"))


def no_room(*args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def refused(capsys, *out) -> str:
    """stderr of a run that ends with status 2 before anything is measured."""
    assert main.main([*COMMAND, *map(str, out)]) == 2
    text = capsys.readouterr()
    assert "bandwidth" not in text.out and FakeMeter.measured == 0
    assert text.err.startswith("sgl-prefix-attn calibrate: ") and text.err.count("\n") == 1
    return text.err


def test_a_file_that_cannot_be_written_is_refused_before_measuring(gpu, capsys):
    (gpu / "file").touch()
    for out in (gpu / "file" / "x.json", gpu / "file" / "new" / "x.json"):
        assert f"{out}: " in refused(capsys, "--out", out)
    assert f"--out: {gpu} is a folder" in refused(capsys, "--out", gpu)


@pytest.mark.slow
def test_without_a_home_it_says_what_to_do(gpu, no_home, capsys):
    text = refused(capsys)
    assert "no home folder" in text and "XDG_CACHE_HOME" in text and "--out" in text
    assert main.main([*COMMAND, "--out", str(gpu / "x.json")]) == 0


@pytest.mark.long
def test_a_disk_that_gets_full_loses_no_batch(gpu, capsys, monkeypatch):
    path = gpu / "x.json"
    samples_path = path.with_suffix(".samples.jsonl")
    append, first = samples.append, []

    def append_ten(to, sample):
        with pytest.MonkeyPatch.context() as patch:
            if len(first) == 10:
                patch.setattr(samples.msgspec.json, "encode", no_room)
            append(to, sample)
        first.append(sample)

    monkeypatch.setattr(samples, "append", append_ten)
    assert main.main([*COMMAND, "--out", str(path)]) == 2
    text = capsys.readouterr().err
    assert f"{samples_path}: No space left on device" in text
    monkeypatch.setattr(samples, "append", append)
    FakeMeter.measured = 0
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_room)
        assert main.main([*COMMAND, "--out", str(path)]) == 2
    assert f"{path}: No space left on device" in capsys.readouterr().err
    assert FakeMeter.measured == 40 and sorted(gpu.iterdir()) == [samples_path]
    assert main.main([*COMMAND, "--out", str(path)]) == 0 and FakeMeter.measured == 40


def test_interrupted(gpu, capsys, monkeypatch):
    def interrupt(self, batch, plans):
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeMeter, "measure", interrupt)
    assert main.main(COMMAND) == 130
    assert "interrupted" in capsys.readouterr().err


DEEPSEEK = {
    "num_attention_heads": 128, "num_key_value_heads": 128, "hidden_size": 7168,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64,
}  # fmt: skip


def test_latent_attention_is_measured_by_the_heads_that_decode(gpu, capsys, monkeypatch):
    (gpu / "config.json").write_text(json.dumps(DEEPSEEK))
    out = gpu / "x.json"
    options = ["calibrate", "--model", str(gpu), "--tp", "8", "--batches", "40", "--out", str(out)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert main.main([*options, "--fallback", "fa3"]) == 0
    key = replace(KEY, heads=HeadConfig(16, 1, 576, 512), fallback="fa3")
    assert store.load(out).key == key
    assert main.main(options) == 2
    said = "--fallback: flashinfer is not measured over 16/1 heads of 576, 512 latent, but fa3"
    assert said in capsys.readouterr().err


def test_heads_by_which_a_model_never_decodes_are_not_taken(gpu, capsys):
    """As config.json has them, they would be 32/32 heads of 56 on each of four ranks."""
    (gpu / "config.json").write_text(json.dumps(DEEPSEEK))
    assert main.main(["analyze", "trace.jsonl", "--model", str(gpu), "--tp", "4"]) == 2
    assert f"{gpu} has latent attention (kv_lora_rank)" in capsys.readouterr().err
    assert FakeMeter.measured == 0


def test_a_size_of_latent_attention_that_is_none_is_named(gpu, capsys, monkeypatch):
    (gpu / "config.json").write_text(json.dumps(DEEPSEEK | {"qk_rope_head_dim": None}))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert main.main(["calibrate", "--model", str(gpu), "--fallback", "fa3"]) == 2
    said = f"--model: {gpu}: qk_rope_head_dim must be a positive integer, got None"
    assert said in capsys.readouterr().err
