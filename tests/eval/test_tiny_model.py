"""The tiny Llama: reproducible, with a tokenizer that round-trips and attention that matters."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from eval.tiny_model import write_tiny_llama


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("llama"))


def test_same_arguments_same_bytes(model_dir, tmp_path):
    again = write_tiny_llama(tmp_path / "again")
    names = sorted(path.name for path in model_dir.iterdir())
    assert names == sorted(path.name for path in again.iterdir())
    for name in names:
        assert (model_dir / name).read_bytes() == (again / name).read_bytes(), name


def test_another_seed_other_weights_same_tokenizer(model_dir, tmp_path):
    other = write_tiny_llama(tmp_path / "other", seed=7)
    weights, others = (load_file(d / "model.safetensors") for d in (model_dir, other))
    assert not torch.equal(weights["lm_head.weight"], others["lm_head.weight"])
    assert (model_dir / "tokenizer.json").read_bytes() == (other / "tokenizer.json").read_bytes()


def test_tokenizer_covers_the_vocabulary_and_round_trips(model_dir):
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    config = json.loads((model_dir / "config.json").read_text())
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    text = "search(argument: text) -> text\n\tÄ 東京 x=3"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_attention_is_peaked_and_moves_the_output(model_dir):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager")
    ids = torch.randint(3, 1024, (1, 128), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        result = model(ids, output_attentions=True)
        changed = model(torch.cat((ids[:, 1:2], ids[:, 1:]), dim=1))
    peak = result.attentions[0][0, :, 64:].max(-1).values.mean()
    assert 0.3 < peak < 0.99, "uniform over 64 and more positions would be below 0.02"
    # One token 127 positions back: visible in the last token's logits, far above rounding.
    assert (changed.logits[0, -1] - result.logits[0, -1]).abs().max() > 1e-3
