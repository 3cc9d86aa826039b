"""A fleet of agents that call tools: one manual of all tools, each agent its own task and history.

Shared while they decode: the manual, by all agents. With the sizes below that is 6144 of 6.3 K to
7.5 K tokens of each, 0.9 of all KV that stock attention reads.
"""

import random

import sglang as sgl


@sgl.function
def tool_agent(s, manual, task, run_tool, turns, call_tokens, answer_tokens):
    """run_tool(text of the call) -> text of the result; an agent makes `turns` calls."""
    s += manual
    s += "\ntask: " + task + "\n"
    for turn in range(turns):
        s += f"call {turn}: "
        s += sgl.gen(f"call_{turn}", max_tokens=call_tokens)
        s += "\nresult: " + run_tool(s[f"call_{turn}"]) + "\n"
    s += "answer: "
    s += sgl.gen("answer", max_tokens=answer_tokens)


def programs(
    count, *, seed=0, turns=4, manual_tokens=6144, task_tokens=64, call_tokens=128,
    result_tokens=128, answer_tokens=192,
):  # fmt: skip
    """Return the program, its manual bound, and the arguments of `count` agents."""
    rng = random.Random(f"tool agents {seed}")

    def words(number):
        return " ".join(f"w{rng.randrange(1000)}" for _ in range(number))

    def tool():
        results = iter([words(result_tokens) for _ in range(turns)])
        return lambda call: next(results)  # made up beforehand, whatever the agent asks

    program = tool_agent.bind(
        manual=words(manual_tokens), turns=turns, call_tokens=call_tokens,
        answer_tokens=answer_tokens,
    )  # fmt: skip
    return program, [{"task": words(task_tokens), "run_tool": tool()} for _ in range(count)]
