"""The demo's requests: agents that call tools, written with the SGLang frontend.

One system prompt with the descriptions of all tools -> a branch for each tool -> several calls of
it at once -> one answer from all results -> a follow-up turn. Every call of every tool is a request
that shares the system prompt, and its tool's instructions with its siblings.
"""

from dataclasses import dataclass, replace

import sglang as sgl
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint

TOOLS = {
    "search": "find documents about a query and return their titles with one line each",
    "read": "open one document by title and return the paragraph that answers the question",
    "calculate": "evaluate an arithmetic expression and return the number with its unit",
    "convert": "turn an amount of one unit or currency into another, at the rate of a given day",
}
QUESTIONS = (
    "How far is the harbour from the old town, and how long does the walk take with a child?",
    "Which of the three proposals costs least over ten years, and what does it leave out?",
)
CALLS_PER_TOOL = 3
CALL_TOKENS, ANSWER_TOKENS = 24, 32
RULES_PER_TOOL = 10


@dataclass(frozen=True)
class Output:
    """What the server generated for one request.

    top           of each token the two best as (token id, log-probability)
    fixed_prompt  whether the prompt holds nothing that the server generated
    """

    name: str
    token_ids: tuple[int, ...]
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    fixed_prompt: bool = True


class WorkloadError(RuntimeError):
    """A request failed; one sentence."""


def system_prompt() -> str:
    """Write about 1500 tokens of the demo's tokenizer."""
    lines = ["You are a helpful assistant with tools. Call one tool at a time and wait for it.\n"]
    for name, purpose in TOOLS.items():
        lines.append(f"\n## {name}(argument: text) -> text\nUse it to {purpose}.\n")
        for rule in range(1, RULES_PER_TOOL + 1):
            lines.append(f"- rule {rule} of {name}: check argument {rule}, then return the text.\n")
    return "".join(lines)


@sgl.function
def agent(s, question):
    """Return the outputs of all requests of one conversation."""
    s += system_prompt() + f"\nuser: {question}\n"
    calls = []
    for tool, branch in zip(TOOLS, s.fork(len(TOOLS)), strict=True):
        branch += f"assistant: the tool for this step is {tool}, used to {TOOLS[tool]}.\n"
        for number, call in enumerate(branch.fork(CALLS_PER_TOOL), start=1):
            call += f"call {number} of {tool}: "
            call += sgl.gen("result", max_tokens=CALL_TOKENS)
            calls.append((f"{tool} {number}", call))
    outputs = [_output(name, call, "result", fixed_prompt=True) for name, call in calls]
    for name, call in calls:
        s += f"{name} returned: {call['result']}\n"
    s += "assistant: " + sgl.gen("answer", max_tokens=ANSWER_TOKENS)
    s += "\nuser: Explain the answer in one sentence.\nassistant: "
    s += sgl.gen("explanation", max_tokens=ANSWER_TOKENS)
    last = ("answer", "explanation")
    return outputs + [_output(name, s, name, fixed_prompt=False) for name in last]


def run_workload(url: str) -> list[Output]:
    """Run all agents at once, greedy. Raises WorkloadError if a request failed."""
    endpoint = RuntimeEndpoint(url, chat_template_name="default")
    states = agent.run_batch(
        [{"question": question} for question in QUESTIONS],
        temperature=0,
        ignore_eos=True,
        return_logprob=True,
        top_logprobs_num=2,
        backend=endpoint,
    )
    return [
        replace(output, name=f"agent {number}: {output.name}")
        for number, state in enumerate(states, start=1)
        for output in state.ret_value
    ]


def _output(name: str, state, variable: str, fixed_prompt: bool) -> Output:
    info = state.get_meta_info(variable)
    if info is None:
        raise WorkloadError(f"request {name!r} failed: {state.error()}")
    return Output(
        name,
        tuple(token for _, token, _ in info["output_token_logprobs"]),
        tuple(
            tuple((token, logprob) for logprob, token, _ in best)
            for best in info["output_top_logprobs"]
        ),
        fixed_prompt,
    )
