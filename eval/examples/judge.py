"""A language model as the judge of essays: a critique for each criterion at once, then a verdict.

Shared while they decode: the rubric, by all critiques of all essays, and an essay, by its
critiques. With the sizes below that is 0.98 of the KV that stock attention reads while critiques
are written, 0.83 the rubric alone.

`select` generates nothing: SGLang scores the choices by prefilling the prompt once and then every
choice behind it, so choices of equally many tokens cost the same whichever is taken.
"""

import random

import sglang as sgl

CRITERIA = ("clarity", "originality", "evidence", "structure")
VERDICTS = ("accept", "reject")


@sgl.function
def judge(s, rubric, essay, critique_tokens, summary_tokens):
    s += rubric
    s += "\nessay: " + essay + "\n"
    s.sync()  # else fork may not see the text, and every branch prefills it
    critics = s.fork(len(CRITERIA))
    for criterion, critic in zip(CRITERIA, critics, strict=True):
        critic += f"{criterion}: "
        critic += sgl.gen("critique", max_tokens=critique_tokens)
    for criterion, critic in zip(CRITERIA, critics, strict=True):
        s += f"{criterion}: " + critic["critique"] + "\n"
    s += "summary: "
    s += sgl.gen("summary", max_tokens=summary_tokens)
    s += "\nverdict: "
    s += sgl.select("verdict", choices=list(VERDICTS))


def programs(
    count, *, seed=0, rubric_tokens=4096, essay_tokens=768, critique_tokens=192,
    summary_tokens=192,
):  # fmt: skip
    """Return the program, its rubric bound, and the arguments of `count` essays."""
    rng = random.Random(f"judge {seed}")

    def words(number):
        return " ".join(f"w{rng.randrange(1000)}" for _ in range(number))

    program = judge.bind(
        rubric=words(rubric_tokens),
        critique_tokens=critique_tokens,
        summary_tokens=summary_tokens,
    )
    return program, [{"essay": words(essay_tokens)} for _ in range(count)]
