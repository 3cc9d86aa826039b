"""Prompts that share on several levels: self-consistency and tree search."""

from __future__ import annotations

from itertools import count, product

from eval.workloads.load import Load, Request

# Self-consistency: chain-of-thought examples for all, questions, samples of each.
_EXAMPLES, _QUESTION, _QUESTIONS, _SAMPLES, _ANSWER = 1200, 120, 16, 16, 256
# Tree search: problems, thoughts below each state, levels.
_PROBLEM, _THOUGHT, _PROBLEMS, _BRANCHES, _LEVELS = 1024, 128, 8, 4, 3


def self_consistency() -> Load:
    """Sample each question several times, below the same examples."""
    keys = count(1)
    questions = [((0, _EXAMPLES), (next(keys), _QUESTION)) for _ in range(_QUESTIONS)]
    requests = [Request(question, _ANSWER) for question in questions for _ in range(_SAMPLES)]
    return Load("selfconsistency", tuple(requests), "fixed lengths")


def tree_search() -> Load:
    """Expand every state of a tree by several thoughts, level by level.

    A state's prompt is the problem and the thoughts on its path: of fixed tokens, since those that
    a model with random weights generates are not what a search would go on with. All states are
    offered in the order of their levels, none waits for the one above.
    """
    keys = count()
    requests = []
    states = [((next(keys), _PROBLEM),) for _ in range(_PROBLEMS)]
    for level in range(_LEVELS):
        if level:
            below = product(states, range(_BRANCHES))
            states = [(*state, (next(keys), _THOUGHT)) for state, _ in below]
        requests += [Request(state, _THOUGHT) for state in states for _ in range(_BRANCHES)]
    return Load("tree", tuple(requests), "fixed lengths")
