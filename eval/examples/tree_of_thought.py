"""Tree of thought: several ideas for each step of a problem, a vote, the best idea kept.

Shared while they decode: the worked examples, by all branches of all problems, and a problem with
the steps so far, by its branches. With the sizes below that is 0.98 of the KV that stock attention
reads while ideas are written, 0.90 the examples alone.
"""

import random

import sglang as sgl


@sgl.function
def tree_of_thought(
    s, examples, problem, pick, steps, branches, idea_tokens, vote_tokens, answer_tokens
):
    """pick(text of the vote) -> number of the idea that is kept."""
    s += examples
    s += "\nproblem: " + problem + "\n"
    s.sync()  # else fork may not see the text, and every branch prefills it
    for step in range(steps):
        ideas = s.fork(branches)
        for number, idea in enumerate(ideas):
            idea += f"step {step} idea {number}: "
            idea += sgl.gen("idea", max_tokens=idea_tokens)
        with s.copy() as voter:
            for number, idea in enumerate(ideas):
                voter += f"idea {number}: " + idea["idea"] + "\n"
            voter += "best idea: "
            voter += sgl.gen("vote", max_tokens=vote_tokens)
            best = pick(voter["vote"])
        s += f"step {step} idea {best}: " + ideas[best]["idea"] + "\n"
    s += "answer: "
    s += sgl.gen("answer", max_tokens=answer_tokens)


def programs(
    count, *, seed=0, steps=3, branches=4, examples_tokens=4096, problem_tokens=256,
    idea_tokens=128, vote_tokens=16, answer_tokens=128,
):  # fmt: skip
    """Return the program, its examples bound, and the arguments of `count` problems."""
    rng = random.Random(f"tree of thought {seed}")

    def words(number):
        return " ".join(f"w{rng.randrange(1000)}" for _ in range(number))

    def voting():
        votes = iter([rng.randrange(branches) for _ in range(steps)])
        return lambda vote: next(votes)  # drawn beforehand, whatever the voter writes

    program = tree_of_thought.bind(
        examples=words(examples_tokens), steps=steps, branches=branches, idea_tokens=idea_tokens,
        vote_tokens=vote_tokens, answer_tokens=answer_tokens,
    )  # fmt: skip
    return program, [{"problem": words(problem_tokens), "pick": voting()} for _ in range(count)]
