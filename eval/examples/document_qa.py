"""Questions about several documents: quotes from each document at once, then an answer from them.

Shared while they decode: a library's documents, by all branches of all its questions. With the
sizes below that is 0.98 of the KV that stock attention reads while quotes are written: eight
libraries of 6144 tokens for 256 requests, more than a GPU's L2 cache holds of a layer.
"""

import random

import sglang as sgl


@sgl.function
def document_qa(s, documents, question, quote_tokens, answer_tokens):
    for number, document in enumerate(documents):
        s += f"document {number}: {document}\n"
    s += "question: " + question + "\n"
    s.sync()  # else fork may not see the text, and every branch prefills it
    readers = s.fork(len(documents))
    for number, reader in enumerate(readers):
        reader += f"quotes from document {number}: "
        reader += sgl.gen("quotes", max_tokens=quote_tokens)
    for number, reader in enumerate(readers):
        s += f"document {number} says: " + reader["quotes"] + "\n"
    s += "answer: "
    s += sgl.gen("answer", max_tokens=answer_tokens)


def programs(
    count, *, seed=0, libraries=8, documents=4, document_tokens=1536, question_tokens=64,
    quote_tokens=128, answer_tokens=256,
):  # fmt: skip
    """Return the program and the arguments of `count` questions, the libraries in turn."""
    rng = random.Random(f"document QA {seed}")

    def words(number):
        return " ".join(f"w{rng.randrange(1000)}" for _ in range(number))

    library = [[words(document_tokens) for _ in range(documents)] for _ in range(libraries)]
    program = document_qa.bind(quote_tokens=quote_tokens, answer_tokens=answer_tokens)
    return program, [
        {"documents": library[i % libraries], "question": words(question_tokens)}
        for i in range(count)
    ]
