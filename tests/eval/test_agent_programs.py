"""The programs of eval/examples: on a backend that counts, and on real servers of a tiny model."""

import importlib
import json
from types import SimpleNamespace

import pytest
from sglang.lang.backend.base_backend import BaseBackend
from sglang.lang.chat_template import get_chat_template
from sglang.lang.choices import ChoicesDecision

from eval.bench_agents import __main__ as bench_agents
from eval.bench_agents import runs
from eval.server_process import ServerError

# Of one instance at the default sizes: requests and output tokens. A fork prefills its prompt once,
# then there is one request for each branch.
WORK = {
    "tool_agents": (5, 4 * 128 + 192),
    "tree_of_thought": (3 * (1 + 4 + 1) + 1, 3 * (4 * 128 + 16) + 128),
    "judge": (1 + 4 + 1 + 1, 4 * 192 + 192),
    "document_qa": (1 + 4 + 1, 4 * 128 + 256),
}


class Words(BaseBackend):
    """A backend that writes as many words as it may, and keeps how long each prompt was."""

    def __init__(self, word="w1", fails=False):
        super().__init__()
        self.word, self.fails = word, fails
        self.prompts, self.output = [], 0

    def get_chat_template(self):
        return get_chat_template("default")

    def generate(self, s, sampling_params):
        if self.fails:
            raise RuntimeError("too long")
        assert sampling_params.ignore_eos and sampling_params.temperature == 0
        self.prompts.append(s.text_)
        self.output += sampling_params.max_new_tokens
        return " ".join([self.word] * sampling_params.max_new_tokens), {}

    def commit_lazy_operations(self, s):
        self.prompts.append(s.text_)

    def select(self, s, choices, temperature, choices_method):
        assert len({len(choice.split()) for choice in choices}) == 1
        self.prompts.append(s.text_)
        return ChoicesDecision(decision=choices[-1], meta_info={})

    def lengths(self):
        return sorted(len(prompt.split()) for prompt in self.prompts)


def run_on(backend, program, count=2, **changes):
    module = importlib.import_module(f"eval.examples.{program}")
    function, batch = module.programs(count, **changes)
    states = function.run_batch(batch, temperature=0, ignore_eos=True, backend=backend)
    return [state.error() for state in states]


@pytest.mark.parametrize("program", runs.PROGRAMS)
def test_a_program_is_the_same_work_whatever_is_generated(program):
    one, other = Words("w1"), Words("w900 ")
    assert run_on(one, program) == run_on(other, program) == [None, None]
    requests, output = WORK[program]
    assert (len(one.prompts), one.output) == (2 * requests, 2 * output)
    assert (one.lengths(), one.output) == (other.lengths(), other.output)
    assert one.prompts != other.prompts


@pytest.mark.parametrize("program", runs.PROGRAMS)
def test_instances_share_their_head_and_nothing_else(program):
    backend = Words()
    changes = {"libraries": 1} if program == "document_qa" else {}
    run_on(backend, program, **changes)
    head, *_ = (name for name in runs.sizes(program) if name.endswith("_tokens"))
    size = runs.sizes(program)[head] * (4 if program == "document_qa" else 1)
    assert len({" ".join(prompt.split()[:size]) for prompt in backend.prompts}) == 1
    assert len({" ".join(prompt.split()[: size + 20]) for prompt in backend.prompts}) == 2


@pytest.mark.parametrize("program", runs.PROGRAMS)
def test_sizes_follow_the_arguments_and_the_seed(program):
    small = runs.sizes(program, scale=16)
    for name, size in runs.sizes(program).items():
        assert small[name] == (size // 16 if name.endswith("_tokens") else size), name
    backends = [Words() for _ in range(3)]
    for backend, seed in zip(backends, (0, 0, 1), strict=True):
        run_on(backend, program, seed=seed, **small)
    first, again, another = backends
    assert sorted(first.prompts) == sorted(again.prompts)
    assert not set(first.prompts) & set(another.prompts)
    assert first.lengths() == another.lengths()
    assert first.lengths()[-1] < 600


def server(alive=True):
    def check_alive(when):
        if not alive:
            raise ServerError(f"ended {when}")

    return SimpleNamespace(url="", flush_cache=lambda: None, counters=dict, check_alive=check_alive)


@pytest.mark.filterwarnings("ignore:Error in stream_executor")
def test_a_failed_request_and_a_dead_server_are_told_apart(monkeypatch):
    monkeypatch.setattr("sglang.RuntimeEndpoint", lambda *_, **__: Words(fails=True))
    for program in runs.PROGRAMS:
        with pytest.raises(runs.ProgramError, match=f"{program} failed"):
            runs.run(server(), program, 2, seed=0, scale=64)
    with pytest.raises(ServerError, match="ended while it ran judge"):
        runs.run(server(alive=False), "judge", 2, seed=0, scale=64)


# Of two instances: requests, and output tokens at 1/16 of the sizes. One request more prefills
# what a program binds for all of its instances.
SERVED = {
    "tool_agents": (2 * 5 + 1, 2 * (4 * 8 + 12)),
    "tree_of_thought": (2 * 19 + 1, 2 * (3 * (4 * 8 + 1) + 8)),
    "judge": (2 * (1 + 4 + 1 + 1 + 2) + 1, 2 * (4 * 12 + 12)),
    "document_qa": (2 * 6, 2 * (4 * 8 + 16)),
}


@pytest.mark.engine
@pytest.mark.long
def test_backends_do_the_same_work_and_prefix_steps_run(tmp_path, monkeypatch, capsys):
    # A model of this size is too small for the policy to choose prefix kernels.
    monkeypatch.setenv("PREFIX_ATTN_POLICY", "prefix")
    out = tmp_path / "agents.json"
    status = bench_agents.main(
        [
            *("--device", "cpu", "--model-shape", "tiny", "--backends", "torch_native,prefix"),
            *("--count", "2", "--scale", "16", "--json", str(out)),
        ]
    )
    said = capsys.readouterr()
    assert status == 0, said.err
    rows = json.loads(out.read_text())["rows"]
    assert [row["program"] for row in rows] == [*runs.PROGRAMS] * 2
    for row in rows:
        assert (row["requests"], row["output_tokens"]) == SERVED[row["program"]]
        ours = row["backend"] == "prefix"
        assert (row["prefix_steps"] > 0) == ours and row["stock_steps"] == 0
        assert row["cached_share"] > 0.4
    assert "| geometric mean | 1.000 |" in said.out
