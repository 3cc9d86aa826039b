"""eval.word_tokenizer: a text has as many tokens as it was made of."""

from transformers import AutoTokenizer

from eval.model_shapes import SHAPES
from eval.word_tokenizer import text, write_word_model


def test_texts_are_their_ids_however_they_are_put_together(tmp_path):
    vocabulary = SHAPES["tiny"]["vocab_size"]
    tokenizer = AutoTokenizer.from_pretrained(write_word_model(tmp_path / "model", "tiny"))
    ids = [0, 1, 2, vocabulary - 1, 7, 7]
    assert tokenizer.encode(text(ids)) == ids and tokenizer.decode(ids) == text(ids)
    assert tokenizer.encode(text(ids) + "\n\n" + text([5])) == [*ids, 5]
    assert sorted(tokenizer.get_vocab().values()) == list(range(vocabulary))
    assert tokenizer.encode(f"{vocabulary:x} hello 1a") == [0, 0, 26]
    messages = [{"role": "user", "content": text(ids)}, {"role": "user", "content": text([5])}]
    prompt = tokenizer.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert prompt == [*ids, 5]
