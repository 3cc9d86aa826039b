"""What engines are compared on: a model of seeded weights and requests of random tokens, or a
trained model and requests of real text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eval import checkpoints, help_desk
from eval.checkpoints import Checkpoint
from eval.compare_outputs import scenarios, seeded_engine

# Of each question, so that chats with the same one share more than the system prompt.
_STYLES = ("", " Answer in one word.", " Explain it to a child.", " Say it twice.")
_OPENING = 64  # tokens of the text below that all requests begin with
_TEXT = """\
The old lighthouse on the northern cape had been dark for eleven years when Marta Lindqvist bought
it. The council sold it for the price of a used car, together with two acres of heather, a well that
gave brown water in autumn, and a shed full of rope. She had been an engineer on ferries, and she
said that a tower with a broken lamp was a smaller problem than a ship with a broken engine, because
a tower stays where you left it. In the first spring she carried three hundred buckets of sand and
broken glass down the stairs. There are one hundred and twelve steps, and by June she no longer
counted them. Her neighbour, a sheep farmer called Odd, watched from his tractor and offered advice
about the roof, most of which turned out to be right. The slates on the west side had been laid by
somebody in a hurry, he said, and the rain had known it from the first day.
In the second year she turned to the lamp. The great lens was still there, taller than a man, packed
in straw behind a false wall where the last keeper had hidden it from the company that came to take
the brass. Marta found his letter under the straw. He wrote that he had no quarrel with electricity,
but that a lens which had brought home four generations of fishermen should not end as a coffee
table in the capital. He asked whoever read this to turn it once a year, so that the bearings would
not set. She turned it that evening, with both hands, and it moved as if he had left an hour ago.
The harbour office told her that ships no longer needed the light, since every boat now knew its
place from the sky. She answered that she did not light it for the boats that knew where they were.
It took two winters, a borrowed generator and the patience of the whole village, but on the last
night of November the beam went out over the water again, white, then dark, then white. Odd had come
without his tractor. He stood beside her for a long time and then said that the roof would have to
be done again before Easter. Far out, a small boat that had no business being there so late changed
its course by a few degrees, and came slowly in behind the breakwater. Nobody ever found out whose
it was, though the children of the village had a theory for every day of the week, and the harbour
office wrote a report of four pages which said, in the end, that the sea is large and people are
sometimes out on it without telling anybody. In the morning there was a box of cod on the lowest
step, cleaned and wrapped in newspaper, with no name on it, and Marta, who had never liked cod, ate
it for the rest of the week."""


@dataclass(frozen=True)
class Subject:
    """A model and what it is asked.

    model     its folder
    layers    how many it has
    requests  of each scenario, as engine_worker takes them; `then` are the tokens that a request
              goes on with, instead of greedy ones
    """

    model: Path
    layers: int
    requests: dict[str, list[dict]]


def seeded(folder: Path, args) -> Subject:
    """Write a model of a shape's layers into a folder."""
    vocab = seeded_engine.vocab(args.model_shape)
    requests = {
        name: scenarios.build(name, vocab, args.new_tokens, args.scale) for name in args.scenarios
    }
    model = seeded_engine.write_model(folder, args.model_shape, args.layers)
    return Subject(model, args.layers, requests)


def trained(checkpoint: Checkpoint, new_tokens: int) -> Subject:
    """Take a released checkpoint, which is downloaded if need be. Raises ModelError."""
    from transformers import AutoConfig, AutoTokenizer

    model = checkpoints.model(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(model)

    def text(words: str) -> list[int]:
        first = [] if checkpoint.chats else [tokenizer.bos_token_id]
        return first + tokenizer(words, add_special_tokens=checkpoint.chats).input_ids

    def chat(question: str) -> list[int]:
        messages = help_desk.messages(question)
        if not checkpoint.chats:
            return text("\n".join(message["content"] for message in messages) + "\n")
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )

    chats = [chat(question + style) for question in help_desk.QUESTIONS for style in _STYLES]
    requests = {
        "chats": [{"ids": ids, "new_tokens": new_tokens} for ids in chats],
        "text": going_on(text(_TEXT), new_tokens),
    }
    return Subject(model, AutoConfig.from_pretrained(model).num_hidden_layers, requests)


def going_on(text: list[int], new_tokens: int) -> list[dict]:
    """Cut a text behind its opening into parts: each request is the text up to a part, and goes on
    with that one."""
    return [
        {"ids": text[:at], "new_tokens": new_tokens, "then": text[at : at + new_tokens]}
        for at in range(_OPENING, len(text) - new_tokens + 1, new_tokens)
    ]
