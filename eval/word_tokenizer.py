"""A tokenizer of one word per id, made on the spot: texts of exact lengths without a download.

Id 26 is the word `1a`, as short as a usual token; words are separated by white space, and there is
no special token, so `text(ids)` is as many tokens as there are ids, whatever text it is put beside.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

from eval.model_shapes import SHAPES, write_config

# A message's words and nothing else: what a request of the chat API has as its prompt.
_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"


def text(ids: Iterable[int]) -> str:
    """Write token ids as words."""
    return " ".join(f"{i:x}" for i in ids)


def write_word_model(folder: Path, shape: str) -> Path:
    """Write config.json of a shape, for `--load-format dummy`, with a tokenizer of its ids.

    A word that is none of them is id 0."""
    write_config(folder, shape)
    vocabulary = {f"{i:x}": i for i in range(SHAPES[shape]["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": SHAPES[shape]["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
    return folder
