"""The demo's requests, written with the SGLang frontend: agents that call tools, for a model of
random weights; chats of a help desk and the programs of eval/examples, for one of released ones.

An agent: one system prompt with the descriptions of all tools -> a branch for each tool -> several
calls of it at once -> one answer from all results -> a follow-up turn. Every call of every tool is
a request that shares the system prompt, and its tool's instructions with its siblings.
"""

from dataclasses import replace

import sglang as sgl
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint

from eval import help_desk
from eval.bench_agents import runs
from eval.demo.near_ties import Output

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
CALL_TOKENS, ANSWER_TOKENS, CHAT_TOKENS = 24, 32, 40
RULES_PER_TOOL = 10
# Of each program of eval/examples, whose sizes in tokens are divided by the scale.
EXAMPLES, EXAMPLE_SCALE = 2, 64


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


@sgl.function
def chat(s, prompt):
    s += prompt + sgl.gen("answer", max_tokens=CHAT_TOKENS)


def run_agents(url: str) -> list[Output]:
    """Run all agents at once, greedy. Raises WorkloadError if a request failed."""
    states = agent.run_batch([{"question": question} for question in QUESTIONS], **_greedy(url))
    return [
        replace(output, name=f"agent {number}: {output.name}")
        for number, state in enumerate(states, start=1)
        for output in state.ret_value
    ]


def run_chats(url: str, tokenizer) -> list[Output]:
    """Ask all of the help desk's questions at once, greedy, with the chat template of a model's
    tokenizer. Raises WorkloadError if a request failed."""
    prompts = [
        tokenizer.apply_chat_template(
            help_desk.messages(question), add_generation_prompt=True, tokenize=False
        )
        for question in help_desk.QUESTIONS
    ]
    states = chat.run_batch([{"prompt": prompt} for prompt in prompts], **_greedy(url))
    return [
        _output(question, state, "answer", fixed_prompt=True)
        for question, state in zip(help_desk.QUESTIONS, states, strict=True)
    ]


def run_examples(url: str) -> list[Output]:
    """Run the programs of eval/examples one after another, greedy; return what each instance wrote
    last, behind all that it had written. Raises WorkloadError if a request failed."""
    outputs = []
    for name in runs.PROGRAMS:
        run_batch = runs.prepared(name, EXAMPLES, seed=0, scale=EXAMPLE_SCALE)
        states = run_batch(**_greedy(url))
        last = "summary" if name == "judge" else "answer"
        outputs += [
            _output(f"{name} {number}", state, last, fixed_prompt=False)
            for number, state in enumerate(states, start=1)
        ]
    return outputs


def _greedy(url: str) -> dict:
    """Return the options of a run: outputs have one length, and the two best of each token."""
    return {
        "temperature": 0, "ignore_eos": True, "return_logprob": True, "top_logprobs_num": 2,
        "backend": RuntimeEndpoint(url, chat_template_name="default"),
    }  # fmt: skip


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
