"""Real engines on the GPU, CUDA graphs and overlap on: greedy outputs of `prefix` against those of
`flashinfer`, as near as two stock backends are to each other.

bf16 rounding turns near-ties, so outputs of correct backends differ in places. The share of tokens
before a request's first difference is what is compared; `python -m eval.compare_outputs layers`
judges the attention itself, with layers of full size.
"""

import importlib.util
import re
from importlib.metadata import entry_points
from itertools import pairwise

import pytest
import torch

from eval.tiny_model import write_tiny_llama
from tests.sglang.engine import Config, Run, plain, run_together


def _missing() -> str | None:
    if importlib.util.find_spec("sglang") is None:
        return "sglang is not importable: install it, or put an unpacked site on PYTHONPATH"
    if not any(e.name == "prefix_attn" for e in entry_points(group="sglang.srt.plugins")):
        return "the plugin's entry point is not visible: install the project's wheel"
    return None


pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(_missing() is not None, reason=str(_missing())),
]

REFERENCE, NOISE, TESTED = "flashinfer", "triton", "prefix"
SCENARIOS = plain(
    "staggered", "duplicates", "siblings", "two_turns", "unshared", "late_prompt", "crowd"
)
FAULTS = ("shared_node_dropped", "tails_swapped")
MARGIN = 0.1  # of the equal share, below that of two correct backends
ENGINE = {
    "device": "cuda",
    "dtype": "bfloat16",
    "mem_fraction_static": 0.5,  # max_total_tokens sets the pool: engines run side by side
    "cuda_graph_bs_decode": [1, 2, 4, 8, 16],  # 3, 5, 6, 7 are padded
    "grammar_backend": "none",
    "sampling_backend": "pytorch",
    "decode_log_interval": 1,
    "random_seed": 1,
}
# For engines whose decode steps alone are compared: 58 graphs less.
NO_PREFILL_GRAPHS = {"cuda_graph_backend_prefill": "disabled"}
# On Hopper SGLang would choose FlashAttention 3; only decode is to differ from the reference.
SAME_PREFILL = {"prefill_attention_backend": REFERENCE}
ALTERNATE = (("siblings", "alternate"),)
FORCED_STOCK = "forced_stock"  # `prefix`, told to run stock kernels only
LABELLED = "labelled"  # `prefix` with SGLang's LoRA labels on its graphs, and few prefix graphs
HYBRID = "hybrid"  # Triton's prefill, our decode
PORTABLE = "portable"  # `prefix` with the portable kernels, where Hopper's would run
LIMIT = 4


def config_of(run, page_size):
    # The policy would leave batches as small as these to stock kernels.
    env = {"PREFIX_ATTN_CPU_PLATFORM": "0", "PREFIX_ATTN_POLICY": "prefix"}
    scenarios, engine = SCENARIOS, ENGINE | {"page_size": page_size}
    if run in (TESTED, LABELLED, FORCED_STOCK, PORTABLE):
        engine |= SAME_PREFILL
    if run == TESTED:
        scenarios += tuple(("siblings", fault) for fault in FAULTS)
    if run in (TESTED, LABELLED):
        scenarios += ALTERNATE
    if run == FORCED_STOCK:
        scenarios = plain("siblings", "unshared")
        env |= {"PREFIX_ATTN_POLICY": "stock"}
    if run == LABELLED:
        env |= {"PROBE_LORA_LABELS": "1", "PREFIX_ATTN_MAX_VARIANT_BS": str(LIMIT)}
    if run == PORTABLE:
        env |= {"PREFIX_ATTN_KERNELS": "portable"}
    if run == HYBRID:
        engine |= {
            "attention_backend": None,
            "prefill_attention_backend": NOISE,
            "decode_attention_backend": TESTED,
        }
    return Config(f"{run}-page-{page_size}", scenarios, engine, env)


@pytest.fixture(scope="module", params=[1, 16], ids=lambda p: f"page_{p}")
def runs(request, tmp_path_factory):
    """Runs by name. The first engine goes alone: it compiles FlashInfer for the others."""
    folder = tmp_path_factory.mktemp("engines")
    jobs = {
        run: (config_of(run, request.param), run if run in (REFERENCE, NOISE) else TESTED)
        for run in (REFERENCE, NOISE, TESTED, LABELLED, FORCED_STOCK, HYBRID, PORTABLE)
    }
    return first_alone(jobs, folder)


def first_alone(jobs: dict[str, tuple[Config, str]], folder) -> dict[str, Run]:
    """Runs of (configuration, backend) by name on one model, the first before all others."""
    model = write_tiny_llama(
        folder / "model", hidden_size=512, intermediate_size=1024, head_dim=128,
    )  # fmt: skip
    first, *others = jobs
    runs = run_together({first: jobs[first]}, model, folder)
    return runs | run_together({name: jobs[name] for name in others}, model, folder)


def equal_share(a: list[list[int]], b: list[list[int]]) -> float:
    """Tokens before each request's first difference, of all tokens."""
    equal = total = 0
    for x, y in zip(a, b, strict=True):
        assert len(x) == len(y) > 0
        differs = [p != q for p, q in zip(x, y, strict=True)]
        equal += differs.index(True) if any(differs) else len(x)
        total += len(x)
    return equal / total


def of_scenarios(run, scenarios=SCENARIOS) -> list[list[int]]:
    return [tokens for key in scenarios for tokens in run.outputs[key]]


def share(runs, backend, scenarios=SCENARIOS) -> float:
    return equal_share(
        of_scenarios(runs[REFERENCE], scenarios), of_scenarios(runs[backend], scenarios)
    )


def test_outputs_are_as_equal_as_those_of_two_stock_backends(runs, record_property):
    noise, tested = share(runs, NOISE), share(runs, TESTED)
    record_property("equal_share_noise", noise)
    record_property("equal_share_prefix", tested)
    print(f"equal tokens: {REFERENCE}/{TESTED} {tested:.4f}, {REFERENCE}/{NOISE} {noise:.4f}")
    firsts = [
        [tokens[0] for tokens in of_scenarios(runs[backend])] for backend in (REFERENCE, TESTED)
    ]
    assert firsts[0] == firsts[1]
    assert tested >= noise - MARGIN


def test_both_families_of_kernels_are_as_near(runs):
    on_hopper = torch.cuda.get_device_capability() == (9, 0)
    assert ("prefix steps run Hopper kernels" in runs[TESTED].log) == on_hopper
    assert "prefix steps run portable kernels" in runs[PORTABLE].log
    assert share(runs, PORTABLE) >= share(runs, NOISE) - MARGIN


@pytest.mark.parametrize("run", [TESTED, HYBRID])
def test_decode_steps_ran_prefix_kernels_from_a_graph(runs, run):
    run = runs[run]
    assert "Capture target decode" in run.log
    for key in SCENARIOS:
        assert run.steps[key], key
        assert {step["variant"] for step in run.steps[key]} == {"prefix"}, key
    steps = [step for key in SCENARIOS for step in run.steps[key]]
    assert any(step["nodes"] and step["read"] < step["query_centric"] for step in steps)
    assert any(step["nodes"] is None for step in steps), "no step went on with an earlier plan"
    assert all_from_graphs(run.log, "Prefill") and all_from_graphs(run.log)


def test_outputs_with_the_prefill_of_another_backend(runs):
    """Beside those of the backend that prefills, and of ours alone."""
    noise = share(runs, NOISE) - MARGIN
    outputs = of_scenarios(runs[HYBRID])
    assert equal_share(of_scenarios(runs[NOISE]), outputs) >= noise
    assert equal_share(of_scenarios(runs[TESTED]), outputs) >= noise


def all_from_graphs(log: str, phase: str = "Decode") -> bool:
    """Whether SGLang replayed a graph for every batch of the phase that it logged."""
    lines = [line for line in log.splitlines() if f"{phase} batch" in line]
    return bool(lines) and all("cuda graph: True" in line for line in lines)


def prefix_graphs(log: str) -> list[int]:
    """Number of prefix graphs, of every line that tells what they cost."""
    return [int(n) for n in re.findall(r"CUDA graphs with prefix kernels: (\d+) graphs", log)]


@pytest.mark.parametrize("run", [TESTED, LABELLED])
def test_stock_and_prefix_steps_alternate_on_graphs(runs, run):
    """Every second step of one batch is stock, and all of them replay a graph."""
    steps = [s for s in runs[run].steps["siblings", "alternate"] if len(s["requests"]) == 4]
    variants = [step["variant"] for step in steps]
    assert len(variants) > 12 and all(a != b for a, b in pairwise(variants))
    assert {(s["variant"], s["reason"]) for s in steps} == {
        ("stock", "forced"), ("prefix", "forced")
    }  # fmt: skip
    assert all_from_graphs(runs[run].log)
    noise = share(runs, NOISE, plain("siblings"))
    stock = runs[REFERENCE].outputs["siblings", ""]
    assert equal_share(stock, runs[run].outputs["siblings", "alternate"]) >= noise - MARGIN


def test_stock_steps_are_those_of_sglang_without_the_plugin(runs):
    """To the last bit, where all requests arrive at once: the same tokens, none near a tie."""
    run = runs[FORCED_STOCK]
    assert not prefix_graphs(run.log) and all_from_graphs(run.log)
    for key, outputs in run.outputs.items():
        assert outputs == runs[REFERENCE].outputs[key], key


def test_graphs_with_loras_labels_and_a_limit(runs):
    """Each label has both variants; batches above the limit replay the stock graph."""
    run, sizes = runs[LABELLED], ENGINE["cuda_graph_bs_decode"]
    assert prefix_graphs(runs[TESTED].log) == [len(sizes)]
    assert prefix_graphs(run.log) == [2 * len([size for size in sizes if size <= LIMIT])]
    steps = [step for key in SCENARIOS for step in run.steps[key]]
    for step in steps:
        small = len(step["requests"]) <= LIMIT
        expected = ("prefix", "forced") if small else ("stock", "graph_batch_size")
        assert (step["variant"], step["reason"]) == expected
    assert len({step["variant"] for step in steps}) == 2, "some batches are above the limit"
    assert share(runs, LABELLED) >= share(runs, NOISE) - MARGIN


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(runs, fault):
    """The same comparison, on the scenario where all four requests share a prompt."""
    noise = share(runs, NOISE, plain("siblings"))
    stock = runs[REFERENCE].outputs["siblings", ""]
    assert equal_share(stock, runs[TESTED].outputs["siblings", fault]) < noise - MARGIN
