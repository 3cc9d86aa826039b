"""What must not start, with a message that says what is supported."""

import contextlib
from types import SimpleNamespace

import pytest
from sglang.srt.configs.model_config import AttentionArch

from sgl_prefix_attn.patches import server_arguments
from sgl_prefix_attn.plugin import entry_point, hooks, versions
from tests.sglang.engine import Config, plain

RELEASE = versions.installed()


def runner(**model):
    config = {"is_encoder_decoder": False, "attention_arch": AttentionArch.MHA, **model}
    hf_config = SimpleNamespace(architectures=["SomeModel"])
    return SimpleNamespace(model_config=SimpleNamespace(hf_config=hf_config, **config))


@pytest.mark.engine
@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [("STRATEGY", "fastest", "query | naive | compute | pat | calibrated")],
)
def test_a_bad_environment_value_stops_the_server(engines, name, value, allowed):
    config = Config(f"bad_{name}", plain("siblings"), env={f"SGL_PREFIX_ATTN_{name}": value})
    log = engines.failing(config)
    assert f"SGL_PREFIX_ATTN_{name}='{value}': allowed is {allowed}" in log
    assert "Load weight" not in log


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ({"attention_arch": AttentionArch.MLA}, "MLA"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
    ],
)
def test_unsupported_models_are_refused_by_name(model, kind):
    with pytest.raises(ValueError, match=f"SomeModel.*{kind}.*supported are decoder-only models"):
        entry_point.create(runner(**model))


@pytest.mark.parametrize("backends", [("prefix", "prefix"), ("fa3", "prefix"), ("fa3", "fa3")])
def test_they_are_refused_with_the_arguments_when_the_backend_is_asked_for(backends):
    model = runner(attention_arch=AttentionArch.MLA).model_config
    checked = []
    server_args = SimpleNamespace(
        get_attention_backends=lambda: backends, get_model_config=lambda: model
    )
    asked = "prefix" in backends
    with pytest.raises(ValueError, match="MLA") if asked else contextlib.nullcontext():
        server_arguments.hook(checked.append, server_args)
    assert checked == [server_args]


def test_another_sglang_is_refused_and_gets_no_hooks(monkeypatch):
    monkeypatch.setattr(versions.metadata, "version", lambda name: "0.5.99")
    with pytest.raises(RuntimeError, match=r"SGLang 0\.5\.99 is installed, supported is 0\.5\.17"):
        entry_point.create(runner())
    monkeypatch.setattr(versions.metadata, "version", lambda name: "0.5.17+cu130")
    assert versions.installed() == RELEASE


@pytest.mark.parametrize(
    ("hopper", "names", "advised"),
    [
        (True, {"attention_backend": "prefix"}, True),
        (True, {"prefill_attention_backend": "fa3", "decode_attention_backend": "prefix"}, False),
        (False, {"attention_backend": "prefix"}, False),
        (True, {"attention_backend": "prefix", "speculative_algorithm": "EAGLE"}, False),
    ],
)
def test_on_hopper_the_faster_prefill_is_named(monkeypatch, hopper, names, advised):
    from sglang.srt import utils
    from sglang.srt.server_args import ServerArgs

    monkeypatch.setattr(utils, "is_hopper_with_cuda_12_3", lambda: hopper)
    backends = dict.fromkeys(
        ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    )
    args = SimpleNamespace(**backends | {"speculative_algorithm": None} | names)
    args.get_attention_backends = lambda: ServerArgs.get_attention_backends(args)
    advice = entry_point.prefill_advice(args)
    wanted = "--prefill-attention-backend fa3 --decode-attention-backend prefix"
    assert advice.endswith(wanted) if advised else advice is None


def test_a_hook_that_sglang_did_not_apply_is_named():
    from sglang.srt.plugins.hook_registry import HookRegistry

    needed = [hooks.load(name) for name in RELEASE.hooks]
    if not any(map(hooks._is_applied, needed)):  # no other test of this process has applied them
        with pytest.raises(RuntimeError) as error:
            hooks.verify_applied(RELEASE)
        assert all(patch.TARGET in str(error.value) for patch in needed)
        assert "SGLang 0.5.17" in str(error.value) and "SGLANG_PLUGINS" in str(error.value)
    entry_point.register()
    entry_point.register()
    HookRegistry.apply_hooks()
    hooks.verify_applied(RELEASE)


def test_registration_offers_the_backend_once():
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES

    entry_point.register()
    entry_point.register()
    assert ATTENTION_BACKEND_CHOICES.count("prefix") == 1
    assert ATTENTION_BACKENDS["prefix"] is entry_point.create
