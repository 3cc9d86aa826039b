"""What `doctor --model` says of a model before its weights are loaded."""

import json
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.configs.model_config import ModelConfig
from transformers import CONFIG_MAPPING, AutoConfig

from eval.tiny_model import write_tiny_llama
from sgl_prefix_attn.engine import sglang_config
from sgl_prefix_attn.execute.backends import choice
from sgl_prefix_attn.plugin import model_outlook
from sgl_prefix_attn.predict import store
from sgl_prefix_attn.tools import doctor, main
from sgl_prefix_attn.tools.doctor import check_model
from sgl_prefix_attn.tools.doctor_checks import FAIL, OK, WARN, Check

EVERY_FOURTH = {"full_attention_interval": 4}  # as released configs say it
# By model type: architecture, what transformers' default config lacks, why every step is stock, and
# layers that run plans where none is.
MODELS = {
    "llama": ("LlamaForCausalLM", {}, "", "0-31"),
    "mistral": ("MistralForCausalLM", {}, "", "0-31"),
    "phi3": ("Phi3ForCausalLM", {}, "", "0-31"),
    "seed_oss": ("SeedOssForCausalLM", {}, "", "0-63"),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", {}, "", "0-27"),
    "minimax_m2": ("MiniMaxM2ForCausalLM", {}, "", "0-61"),
    "qwen2": ("Qwen2ForCausalLM", {}, "", "0-31"),  # its window is not used
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", {}, "", "0-79"),
    "llama4_text": ("Llama4ForCausalLM", {}, "", "3, 7, 11, 15"),
    "exaone4": ("Exaone4ForCausalLM", {}, "", "3, 7, 11, 15"),
    "olmo3": ("Olmo3ForCausalLM", {}, "", "3, 7, 11, 15"),
    "gpt_oss": ("GptOssForCausalLM", {}, "", "1, 3, 5, 7"),
    "gemma2": ("Gemma2ForCausalLM", {}, "", "1, 3, 5, 7"),
    "gemma3_text": ("Gemma3ForCausalLM", {}, "", "5, 11, 17, 23"),
    "gemma4": ("Gemma4ForConditionalGeneration", {}, "", "5, 11, 17, 23"),
    "mellum": (
        "MellumForCausalLM",
        {"layer_types": 7 * ["sliding_attention"] * 3 + 7 * ["full_attention"]},
        "",
        "21-27",
    ),
    "step3p5": (
        "Step3p5ForCausalLM",
        {"layer_types": 9 * (["full_attention"] + 4 * ["sliding_attention"])},
        "",
        "0, 5, 10",
    ),
    "mimo_v2_flash": (
        "MiMoV2FlashForCausalLM",
        {"hybrid_layer_pattern": 8 * [0, 1, 1, 1, 1, 1], "add_swa_attention_sink_bias": True},
        "layers:head_dim",
        "",
    ),
    "deepseek_v2": ("DeepseekV2ForCausalLM", {"moe_layer_freq": 1}, "", "0-31"),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {"moe_layer_freq": 1}, "", "0-60"),
    "deepseek_v32": (
        "DeepseekV32ForCausalLM",
        {"index_topk": 2048},
        "kv_pool:DSATokenToKVPool",
        "",
    ),
    "qwen3_next": ("Qwen3NextForCausalLM", EVERY_FOURTH, "", "3, 7, 11, 15"),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", EVERY_FOURTH, "", "3, 7, 11, 15"),
    "lfm2": (
        "Lfm2ForCausalLM",
        {"layer_types": 8 * ["conv", "conv", "conv", "full_attention"]},
        "",
        "3, 7, 11, 15",
    ),
    "falcon_h1": ("FalconH1ForCausalLM", {}, "", "0-31"),
    "granitemoehybrid": (
        "GraniteMoeHybridForCausalLM",
        {"layer_types": 8 * ["mamba", "mamba", "mamba", "attention"]},
        "",
        "3, 7, 11, 15",
    ),
}


def write_config(folder, model_type):
    architecture, changes, *_ = MODELS[model_type]
    config = AutoConfig.for_model(model_type).to_dict() | {"architectures": [architecture]}
    (folder / "config.json").write_text(json.dumps(config | changes, default=str))


@pytest.mark.parametrize("model_type", MODELS)
def test_what_a_models_config_says(model_type, tmp_path):
    if model_type not in CONFIG_MAPPING:
        pytest.skip("this transformers does not know it")
    *_, stock, planned = MODELS[model_type]
    write_config(tmp_path, model_type)
    check = check_model(tmp_path, 1, gpu="")
    if stock:
        own = f"every step of this model runs SGLang's own choice for the server's GPU ({stock})"
        assert (check.status, check.detail) == (WARN, own) and not planned
    else:
        assert check.status == OK and check.detail.startswith(f"layers {planned}")


@pytest.fixture
def hopper(monkeypatch, tmp_path):
    """As on an H100 without calibrations but those shipped, of the versions that they are of."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "_other_versions", lambda found, here: [])
    monkeypatch.setattr(choice, "_runs_triton", lambda device: True)
    monkeypatch.setattr(choice.torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(model_outlook, "sglangs_choice", lambda folder, tp: "fa3")


@pytest.mark.parametrize(("tp", "runs"), [(4, True), (1, False)])
def test_the_heads_of_latent_attention_are_those_that_decode(tp, runs, tmp_path, hopper):
    """Of 128 heads, 32 a rank."""
    write_config(tmp_path, "deepseek_v3")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    check = check_model(tmp_path, tp, gpu="NVIDIA H100")
    assert check.status == (OK if runs else WARN)
    if runs:
        said = "layers 0-60 (full attention, 32/1 heads of 576, 512 latent) run plans"
        beside = "stock decode by SGLang's fa3 (layers:latent); calibration shipped: NVIDIA-H100-"
        assert check.detail.startswith(f"{said}; {beside}")
    else:
        assert check.detail.endswith("SGLang's own fa3 (group_size:128)")


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_a_checkpoint_may_bring_an_fp8_kv_cache(key, tmp_path, monkeypatch):
    """In a file of its own or in config.json, as NVIDIA's released models have it."""
    write_config(tmp_path, "llama")
    said = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    if key == "quantization":
        (tmp_path / "hf_quant_config.json").write_text(json.dumps({key: said}))
    else:
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {key: said}))
    assert check_model(tmp_path, 1, gpu="").status == OK
    monkeypatch.setattr(choice, "_runs_triton", lambda device: True)
    monkeypatch.setattr(choice.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(choice.torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "(kv_dtype:float8_e4m3fn)" in check_model(tmp_path, 1, gpu="NVIDIA A100").detail


def test_a_config_that_sglang_cannot_read_is_said(tmp_path):
    write_config(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": []}
    (tmp_path / "config.json").write_text(json.dumps(config))
    check = check_model(tmp_path, 1, gpu="")
    assert check.status == FAIL and check.detail.startswith("SGLang reads no model from it: ")


def test_config_json_may_be_named_itself(tmp_path, capsys):
    write_config(tmp_path, "llama")
    said = []
    for path in (tmp_path, tmp_path / "config.json"):
        main.main(["doctor", "--json", "--model", str(path)])
        checks = json.loads(capsys.readouterr().out)["checks"]
        said += [check for check in checks if check["name"] == "model"]
    assert said[0] == said[1] and said[0]["status"] == OK


GROUPS = {
    "gemma3_text": "layers 5, 11, 17, 23 (full attention, 4/2 heads of 256) run plans, layers 0-4, "
    "6-10, 12-16, 18-22, 24-25 (sliding window, 4/2 heads of 256) stock attention "
    "(layers:sliding_window)",
    "lfm2": "layers 3, 7, 11, 15, 19, 23, 27, 31 (full attention, 16/4 heads of 80) run plans, "
    "layers 0-2, 4-6, 8-10, 12-14, 16-18, 20-22, 24-26, 28-30 SGLang's linear attention",
}


@pytest.mark.parametrize("model_type", GROUPS)
def test_each_group_of_layers_is_named(model_type, tmp_path):
    write_config(tmp_path, model_type)
    check = check_model(tmp_path, 2, gpu="")
    assert check.detail == GROUPS[model_type]


def test_a_model_that_no_server_starts_with_is_a_failure(tmp_path):
    write_tiny_llama(tmp_path, architectures=["NoSuchModel"], model_type="no_such_type")
    check = check_model(tmp_path, 1, gpu="")
    assert check.status == FAIL and "no_such_type" in check.detail


@pytest.mark.parametrize("sinks", [False, True])
def test_sinks_alone(sinks, tmp_path, monkeypatch):
    """No model that SGLang knows has them without windows."""
    write_tiny_llama(tmp_path)
    monkeypatch.setattr(ModelConfig, "_detect_attention_sinks", lambda self: sinks)
    found = model_outlook.outlook(tmp_path, 1)
    assert not found.stock and (found.planned.sinks is not None) == sinks
    assert found.layers == "layers 0-1 (full attention, 8/2 heads of 32) run plans"


@pytest.mark.parametrize(
    ("said", "stock"),
    [
        ({"attn_temperature_len": 1024}, "layers:logit_transform"),
        ({"attn_logit_softcapping_method": "none"}, "layers:logit_transform"),
        ({"attn_temperature_len": -1, "attn_logit_softcapping_method": "tanh"}, ""),
    ],
)
def test_logits_that_are_changed_otherwise_than_by_a_cap(said, stock, tmp_path):
    """As Grok's are."""
    write_tiny_llama(tmp_path, **said)
    assert model_outlook.outlook(tmp_path, 1).stock == stock


@pytest.mark.parametrize("gpu", ["", "NVIDIA H100"])
def test_heads_that_no_kernels_of_a_gpu_take(gpu, tmp_path, monkeypatch):
    write_tiny_llama(tmp_path, head_dim=512, torch_dtype="bfloat16")
    monkeypatch.setattr(model_outlook, "sglangs_choice", lambda folder, tp: "fa3")
    check = check_model(tmp_path, 1, gpu)
    assert check.status == (WARN if gpu else OK)
    assert not gpu or check.detail.endswith("SGLang's own fa3 (head_dim:512)")


@pytest.mark.parametrize(
    ("asked", "status", "said"),
    [
        ("", OK, "; stock decode by SGLang's flashinfer (usual); calibration judged: "),
        ("default", OK, "; stock decode by SGLang's fa3 (asked); calibration shipped: "),
        ("fa2", FAIL, "PREFIX_ATTN_FALLBACK='fa2': allowed is auto | flashinfer | default"),
    ],
)
def test_the_backend_beside_plans_is_named(asked, status, said, tmp_path, monkeypatch, hopper):
    write_tiny_llama(tmp_path, head_dim=128, torch_dtype="bfloat16")
    monkeypatch.setenv("PREFIX_ATTN_FALLBACK", asked)
    check = check_model(tmp_path, 1, "NVIDIA H100")
    assert check.status == status and said in check.detail


@pytest.mark.parametrize(
    ("shape", "env", "said"),
    [
        ({"head_dim": 96}, {}, "calibration conservative: "),
        ({"head_dim": 128}, {"PREFIX_ATTN_KERNELS": "portable"}, "calibration scaled: "),
    ],
)
def test_a_calibration_of_other_layers_is_a_warning(
    shape, env, said, tmp_path, monkeypatch, hopper
):
    write_tiny_llama(tmp_path, **shape, torch_dtype="bfloat16")
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    check = check_model(tmp_path, 1, "NVIDIA H100")
    assert check.status == WARN and said in check.detail and "predicted" in check.fix


def test_a_folder_without_a_config_is_an_error_before_the_machine_is_looked_at(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(doctor, "gather", pytest.fail)
    command = ["doctor", "--model", str(tmp_path), "--json"]
    assert main.main(command) == 2
    error = capsys.readouterr().err
    assert "cannot read" in error and "looking" not in error
    write_tiny_llama(tmp_path)
    monkeypatch.setattr(doctor, "gather", lambda: SimpleNamespace(gpu="", sglang_error=""))
    monkeypatch.setattr(doctor, "run_checks", lambda facts: [])
    monkeypatch.setattr(doctor, "check_model", lambda *_: Check("model", WARN, "runs fa3"))
    assert main.main(command) == 0
    assert "runs fa3" in capsys.readouterr().out


def test_heads_may_be_left_to_a_models_defaults(tmp_path):
    """As released Gemma 3 configs leave them."""
    text = {"model_type": "gemma3_text", "num_hidden_layers": 6, "hidden_size": 2560}
    config = {
        "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": text, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "8/4 heads of 256" in check_model(tmp_path, 1, "").detail


def test_the_backend_is_what_sglangs_arguments_say(tmp_path, monkeypatch):
    """Which a machine without a GPU refuses to resolve."""
    asked = []

    class Arguments:
        def __init__(self, **options):
            asked.append(options)

        def resolve_once(self):
            if asked[-1]["tp_size"] == 3:
                raise RuntimeError("no accelerator")

    monkeypatch.setattr("sglang.srt.server_args.ServerArgs", Arguments)
    monkeypatch.setattr(sglang_config, "default_backend", lambda args: "fa3")
    assert model_outlook.sglangs_choice(tmp_path, 2) == "fa3"
    assert asked[0]["model_path"] == str(tmp_path) and "attention_backend" not in asked[0]
    assert model_outlook.sglangs_choice(tmp_path, 3) == ""
