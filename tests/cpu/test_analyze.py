"""The simulated server against small traces whose answers are known, and against plain Python."""

import math
from collections import OrderedDict
from dataclasses import replace
from io import StringIO

import numpy as np
import orjson
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from sgl_prefix_attn.execute.backends.choice import why_no_hopper_on
from sgl_prefix_attn.execute.backends.family import Family
from sgl_prefix_attn.records import HeadConfig
from sgl_prefix_attn.step.evaluate import evaluate
from sgl_prefix_attn.step.policy import BatchFacts
from sgl_prefix_attn.tools import main
from sgl_prefix_attn.tools.analyze import block_cache, simulation, summary, trace_file
from sgl_prefix_attn.tools.analyze import server_loop as loop
from sgl_prefix_attn.tools.analyze import server_state as sv
from sgl_prefix_attn.tools.analyze.findings import Findings
from sgl_prefix_attn.tools.analyze.model_costs import costs, model_of, prefilled_by_flashinfer
from sgl_prefix_attn.tools.analyze.server_state import Costs
from sgl_prefix_attn.tools.analyze.simulation import simulate
from sgl_prefix_attn.tools.explain.tree import Tree
from sgl_prefix_attn.tools.named_gpus import GPUS, server_on
from tests.support.examples import examples

LLAMA = HeadConfig(32, 8, 128)
# Nothing but the fixed time of a step, and a millisecond a token of prefill.
PLAIN = Costs(0.010, 0.0, 0.001, 0.0, 0.0, kv_tokens=1 << 20, most_running=8)


def trace_of(*requests):
    """(arrival, first and further hash ids, output) -> a trace; a prompt is its blocks of 512."""
    return trace_file.read(
        orjson.dumps(
            {
                "timestamp": at * 1e3,
                "input_length": 512 * len(ids),
                "output_length": output,
                "hash_ids": ids,
            }
        )
        for at, ids, output in requests
    ).trace


class Attention:
    """A predictor for which attention always takes as long, by default next to nothing."""

    source = "measured"

    def __init__(self, stock_us=1e-6, prefix_us=1e-6):
        self.times = stock_us, prefix_us

    def stock(self, seq_lens, unique, query_lens=None):
        return self.times[0]

    def prefix(self, plan):
        return self.times[1]


@pytest.fixture(scope="module")
def server():
    return server_on(GPUS["H100"], LLAMA, "auto")


@pytest.fixture
def run(server):
    def run(trace, costs=PLAIN, policy="auto", predictor=None):
        return simulate(trace, costs, 32, server.planner, predictor or Attention(), policy)

    return run


def test_two_equal_prompts_are_read_once_while_both_run(run):
    done = run(trace_of((0, [1, 2], 11), (0, [1, 2], 11)), policy="prefix")
    lens = 1024 + np.arange(1, 11)
    assert done.reuse == pytest.approx((2 * lens).sum() / (2 * lens - 1024).sum())
    assert done.steps == 10 and done.tokens == 20
    assert [look.unique for look in done.looks] == [1026]
    assert done.looks[0].tokens == 2050 and 0.4 < done.looks[0].saved < 0.5


def test_one_after_the_other_shares_nothing_but_the_cache(run):
    done = run(trace_of((0, [1, 2], 11), (100, [1, 2], 11)))
    assert done.reuse == 1 and done.steps == 20
    assert done.cached == pytest.approx(1023 / 2048)
    assert done.ttft == pytest.approx([1.024, 0.010])  # a pass is not shorter than a step


def test_cached_tokens_cost_what_new_ones_attend_to(run):
    costs = PLAIN._replace(token_pair=1e-6, cached_pair=3e-6)
    done = run(trace_of((0, [1, 2], 11), (100, [1, 2, 3], 11)), costs)
    first = 1.024 + 1e-6 * 1024**2 / 2
    assert done.ttft == pytest.approx(
        [first, 0.512 + 512 * (1e-6 * 512 / 2 + 3e-6 * 1024)], rel=1e-5
    )


def test_flashinfer_prefills_cached_tokens_more_slowly_on_hopper_alone():
    costs = PLAIN._replace(token_pair=1e-6, cached_pair=1e-6)
    assert prefilled_by_flashinfer(costs, GPUS["H100"]).cached_pair == pytest.approx(1.8e-6)
    assert prefilled_by_flashinfer(costs, GPUS["A100"]) == costs
    assert [gpu for gpu in GPUS if GPUS[gpu].is_hopper] == ["H100", "H200"]


def test_half_of_a_prompt_shared_for_half_of_the_time(run):
    done = run(trace_of((0, [1, 2], 21), (0, [1, 3], 11)))
    lens = 1024 + np.arange(1, 21)
    both = (2 * lens[:10]).sum()
    assert done.reuse == pytest.approx((both + lens[10:].sum()) / (both - 5120 + lens[10:].sum()))


def test_prefill_goes_before_decode(run):
    # The first one decodes from 0.512 s on; the second comes at 0.6 s and is prefilled for 0.512 s
    # from 0.602 s on.
    done = run(trace_of((0, [1], 101), (0.6, [2], 2)))
    assert done.ttft == pytest.approx([0.512, 0.514], abs=1e-3)
    assert done.tpot == pytest.approx([(100 * 0.010 + 0.512) / 100, 0.010], rel=1e-5)


def test_attention_is_of_the_kernels_that_are_chosen(run):
    trace = trace_of((0, [1, 2], 3), (0, [1, 2], 3))
    predictor = Attention(stock_us=100.0, prefix_us=50.0)
    assert run(trace, policy="stock", predictor=predictor).tpot[0] == pytest.approx(0.0132, 1e-3)
    assert run(trace, predictor=predictor).tpot[0] == pytest.approx(0.0116, 1e-3)
    assert [look.is_prefix for look in run(trace, predictor=predictor).looks] == [True]
    slower = Attention(stock_us=100.0, prefix_us=101.0)
    done = run(trace, predictor=slower)
    assert done.tpot[0] == pytest.approx(0.0132, 1e-3)
    assert [look.saved for look in done.looks] == [0] and done.reuse > 1.9


class OfBatch(Attention):
    """Stock microseconds by the number of requests."""

    def __init__(self, stock_us, prefix_us=100.0):
        super().__init__(prefix_us=prefix_us)
        self.stock_us = stock_us

    def stock(self, seq_lens, unique, query_lens=None):
        return self.stock_us[seq_lens.size]


def test_kernels_that_have_just_begun_are_held_through_a_small_loss(run):
    outputs = (41, 46, 90, 90)  # the second batch runs for five steps
    trace = trace_of(*((0, [1, 2], output) for output in outputs))
    predictor = OfBatch({4: 96.0, 3: 104.0, 2: 96.0})
    assert [look.is_prefix for look in run(trace, predictor=predictor).looks] == [False, True, True]


def test_a_look_at_a_batch_counts_a_tenth_beside_those_at_ones_like_it(run, monkeypatch):
    states, new_state = [], sv.new_state
    monkeypatch.setattr(
        simulation.sv, "new_state", lambda *args: states.append(new_state(*args)) or states[-1]
    )
    outputs = (11, 21, *(41,) * 14)  # 15 and 14 requests of 513 tokens: 2^12.5 to 2^13
    trace = trace_of(*((0, [i], output) for i, output in enumerate(outputs, 1)))
    most = PLAIN._replace(most_running=16)
    looks = run(trace, most, "stock", OfBatch({16: 1.0, 15: 10.0, 14: 20.0})).looks
    first, second = (32e-6 * us / look.tokens for us, look in zip((10, 20), looks[1:], strict=True))
    like = loop.half_octave(looks[1].tokens)
    assert like == loop.half_octave(looks[2].tokens) != loop.half_octave(looks[0].tokens)
    assert states[0].rates[like] == pytest.approx(0.9 * first + 0.1 * second)


@pytest.mark.parametrize(("alone", "ms"), [(30, 10.4), (60, 10.1)])
def test_the_decode_step_of_the_median_token(run, alone, ms):
    # Three run beside the first one for 10 steps; it decodes so many more tokens alone, behind a
    # prefill that belongs to no step.
    first = (0, [1], 11 + alone)
    trace = trace_of(first, *[(0, [i], 11) for i in (2, 3, 4)], (0.01, [5], 1))
    done = run(trace, PLAIN._replace(request=1e-4))
    assert Findings(done, done, 0.0).between_tokens(done) == pytest.approx(ms)
    nothing = run(trace_of((0, [1], 1)))
    assert math.isnan(Findings(nothing, nothing, 0.0).between_tokens(nothing))


@pytest.mark.parametrize(
    ("limits", "running"),
    [({}, 4), ({"most_running": 3}, 3), ({"kv_tokens": 2 * 1034 + 1033}, 2)],
)
def test_requests_wait_for_room(run, limits, running):
    trace = trace_of(*[(0, [2 * i, 2 * i + 1], 10) for i in range(4)])
    done = run(trace, PLAIN._replace(**limits))
    assert max(look.running for look in done.looks) == running
    assert done.waited == 4 - running and done.too_long == 0
    assert done.tokens == 36 and not np.isnan(done.tpot).any()


def test_shared_prompts_take_room_once(run):
    trace = trace_of(*[(0, [1, 2], 10) for _ in range(4)])
    done = run(trace, PLAIN._replace(kv_tokens=1024 + 40))
    assert max(look.running for look in done.looks) == 4


def test_a_server_as_large_as_one_may_ask_for_takes_no_more_memory_than_the_trace(run):
    trace = trace_of((0, [1, 2], 11), (0, [1, 2], 11))
    limits = PLAIN._replace(most_running=(1 << 31) - 1, kv_tokens=(1 << 31) - 1)
    state = sv.new_state(trace, limits)
    assert state.running.size == 2 and state.cache.holders.size == 2
    assert run(trace, limits).reuse == run(trace).reuse


def test_there_is_a_rate_for_as_many_tokens_as_are_counted():
    rates = sv.new_state(trace_of((0, [1, 2], 11)), PLAIN).rates
    assert loop.half_octave(np.iinfo(np.int64).max) < rates.size


def test_what_never_fits_is_left_out(run):
    done = run(trace_of((0, [1, 2], 10), (0, [1], 10)), PLAIN._replace(kv_tokens=1000))
    assert done.too_long == 1 and np.isnan(done.ttft).tolist() == [True, False]


def test_the_block_used_longest_ago_is_evicted(run):
    prompts = ([1, 2], [3, 4], [1, 2], [5, 6], [3, 4])
    trace = trace_of(*[(100 * i, ids, 2) for i, ids in enumerate(prompts)])
    done = run(trace, PLAIN._replace(kv_tokens=2 * 1024 + 2))
    # 5 takes the place of 3 and 4, not that of 1 and 2, which were used since
    assert done.ttft == pytest.approx([1.024, 1.024, 0.010, 1.024, 1.024])


def test_a_request_of_one_token_does_not_decode(run):
    done = run(trace_of((0, [1], 1)))
    assert done.steps == 0 and done.looks == [] and done.reuse == 1
    findings = Findings(done, done, 0.0)
    assert findings.ratio == 1 and "cannot help" in findings.verdict
    assert findings.saved_mean == findings.saved_p90 == findings.prefix_share == 0


def test_many_looks_are_thinned_and_nothing_else_changes(run, monkeypatch):
    trace = trace_of(*[(0.3 * i, [i % 5, 9, i], 5 + i % 7) for i in range(200)])
    every = run(trace)
    monkeypatch.setattr("sgl_prefix_attn.tools.analyze.simulation.MOST_LOOKS", 8)
    few = run(trace)
    assert len(few.looks) < 16 < len(every.looks)
    assert few.weights.sum() == every.weights.sum() == few.steps == every.steps
    assert few.reuse == every.reuse and np.array_equal(few.tpot, every.tpot)


def test_means_are_over_steps(run):
    # Two share 1,024 tokens for 10 steps; one of them is alone for 90 more, and shares nothing.
    done = run(trace_of((0, [1, 2], 11), (0, [1, 2], 101)), policy="prefix")
    assert done.weights.tolist() == [10, 64, 26]
    findings = Findings(done, done, 0.0)
    assert findings.saved_mean == pytest.approx(0.1 * 1024 / 2050)
    assert findings.saved_p90 == 0
    # They decode from 1.025 s on, 10 ms a step: 19 steps before the second of the table's periods
    # of 0.2025 s begins, of which 10 are of both.
    rows = [line.split() for line in printed(findings).splitlines()]
    table = rows[1 + next(i for i, row in enumerate(rows) if row[:1] == ["start,"]) :][:5]
    assert [row[0] for row in table] == ["1.0", "1.2", "1.4", "1.6", "1.8"]
    assert [row[1] for row in table] == ["1.5", "1.0", "1.0", "1.0", "1.0"]
    assert [row[4] for row in table] == ["26.3%", "0.0%", "0.0%", "0.0%", "0.0%"]


prompts = st.lists(st.integers(0, 3), min_size=1, max_size=6)
arrivals = st.floats(0, 3).map(lambda at: round(at, 3))


@examples(60)
@given(
    st.lists(st.tuples(arrivals, prompts, st.integers(1, 9)), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(1, 8),
)
def test_any_trace(server, requests, most_running, pool):
    trace = trace_of(*requests)
    limits = PLAIN._replace(most_running=most_running, kv_tokens=700 * pool)
    fits = trace.prompt + trace.output <= limits.kv_tokens
    if not fits.any():
        with pytest.raises(ValueError, match="no request fits"):
            simulate(trace, limits, 32, server.planner, Attention(), "auto")
        return
    done = simulate(trace, limits, 32, server.planner, Attention(2.0, 1.0), "auto")
    for look in done.looks:
        assert 0 <= look.saved < 1 and look.unique <= look.read <= look.tokens
    assert done.reuse >= 1 and 0 <= done.cached < 1
    assert done.too_long == (~fits).sum() and (np.isnan(done.ttft) == ~fits).all()
    assert (
        done.tokens
        == (trace.output[fits] - 1).sum()
        == sum(look.running * n for look, n in zip(done.looks, done.weights, strict=True))
        or len(done.looks) < done.steps
    )
    assert (np.isnan(done.tpot) == (~fits | (trace.output == 1))).all()
    assert (done.ttft[fits] > 0).all()
    assert done.weights.sum() == done.steps


@examples(60)
@given(st.lists(st.tuples(arrivals, prompts, st.integers(1, 9)), min_size=1, max_size=12))
def test_the_loop_counts_what_the_forest_of_its_batch_has(server, requests):
    """KV tokens and unique ones, kept one event at a time, against the paths of each batch."""
    trace = trace_of(*requests)
    limits = PLAIN._replace(kv_tokens=5000)
    state = sv.new_state(trace, limits)
    counts = state.counts
    while loop.advance(trace, limits, state, 1):
        lens = loop.lengths(trace, state)
        prefixes = set()
        for r in state.running[: lens.size]:
            names = trace.blocks[trace.first[r] :][: trace.num_blocks[r]]
            prefixes |= set(names.tolist())
        assert counts[sv.N_KV] == lens.sum()
        assert counts[sv.N_HELD] == 512 * len(prefixes)
        assert counts[sv.N_COVERED] == trace.prompt[state.running[: lens.size]].sum()
    assert not counts[[sv.N_KV, sv.N_HELD, sv.N_COVERED, sv.N_RESERVED]].any()


@examples(200)
@given(st.lists(st.tuples(st.sampled_from("hre"), st.integers(1, 8)), min_size=20, max_size=200))
def test_the_block_cache_is_a_dictionary_and_a_queue(events):
    cache = block_cache.new_cache(9)
    held, idle = {}, OrderedDict()
    for event, block in events:
        if event == "h":
            there = block in held or block in idle
            assert block_cache.hold(cache, block) == (there, block not in held)
            idle.pop(block, None)
            held[block] = held.get(block, 0) + 1
        elif event == "r" and block in held:
            held[block] -= 1
            assert block_cache.release(cache, block) == (held[block] == 0)
            if not held[block]:
                del held[block]
                idle[block] = True
        elif event == "e":
            assert block_cache.evict(cache) == bool(idle)
            if idle:
                idle.popitem(last=False)
        assert cache.counts.tolist() == [len(held) + len(idle), len(held)]
        assert set(np.flatnonzero(cache.holders >= 0).tolist()) == {*held, *idle}


@pytest.mark.parametrize(
    ("gpu", "kernels", "family"),
    [
        ("H100", "auto", Family("hopper")),
        ("H200", "hopper", Family("hopper")),
        ("A100", "auto", Family("portable", "compute:8.0")),
        ("H100", "portable", Family("portable", "kernels:portable")),
    ],
)
def test_a_named_gpu_runs_what_its_servers_run(gpu, kernels, family):
    found = server_on(GPUS[gpu], LLAMA, kernels)
    assert found.family == family
    assert found.calibration.key.gpu == GPUS[gpu].name
    paths = Tree.parse("1,64_8192,200").paths()
    decided = evaluate(paths, BatchFacts(), found.planner, found.predictor).decision
    assert decided.variant == "prefix" and decided.predicted.stock_us > decided.predicted.prefix_us


def test_a_named_gpu_knows_what_hoppers_kernels_cannot_run():
    odd = HeadConfig(8, 8, 96)
    assert why_no_hopper_on((9, 0), odd, torch.bfloat16) == "head_dim:96"
    assert server_on(GPUS["H100"], odd, "auto").family == Family("portable", "head_dim:96")


def test_costs_of_a_model():
    config = {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    }  # fmt: skip
    model = model_of(config, LLAMA, 1)
    # less the embedding, two bytes each
    assert model.weights == pytest.approx(2 * (8.03e9 - 128256 * 4096), rel=2e-3)
    assert model_of(None, LLAMA, 1).weights == pytest.approx(model.weights, rel=2e-3)
    assert model.kv_bytes == 131072 and 2 * model.active == model.weights
    half = model_of(config, HeadConfig(16, 4, 128), 2)
    assert half.weights == model.weights / 2 and half.kv_bytes == model.kv_bytes / 2
    experts = config | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1000}
    many = model_of(experts, LLAMA, 1)
    per_expert = 32 * 3 * 4096 * 1000
    assert many.weights / 2 - many.active == 6 * per_expert
    with pytest.raises(ValueError, match="vocab_size must be a positive integer, got None"):
        model_of({k: v for k, v in config.items() if k != "vocab_size"}, LLAMA, 1)


@pytest.mark.parametrize(
    ("said", "size"),
    [
        (None, 2),
        ({}, 2),
        ({"quant_method": "something new", "config_groups": [3]}, 2),
        ({"quant_method": "fp8"}, 1),
        ({"quant_method": "gptq", "bits": 4}, 0.5),
        ({"quant_method": "awq", "w_bit": 4}, 0.5),
        ({"quant_method": "mxfp4"}, 4.25 / 8),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5 / 8),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 0.5),
        ({"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True}, 1),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights":
            {"num_bits": 8}}, "group_1": {"weights": None}}}, 1),
    ],
)  # fmt: skip
def test_quantized_weights_are_read_as_they_are(said, size):
    config = {
        "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 1000,
        "quantization_config": said,
    }  # fmt: skip
    layers = 2 * (2 * 64 * 128 * (32 + 8) + 3 * 64 * 128)
    assert model_of(config, LLAMA, 1).weights == size * layers + 2 * 64 * 1000


@pytest.mark.parametrize("value", [0, -1, 1.5, None])
@pytest.mark.parametrize(
    "name", ["hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size"]
)
def test_a_size_of_a_model_that_is_none_is_named(name, value):
    config = {
        "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 1000,
    }  # fmt: skip
    with pytest.raises(ValueError, match=f"{name} must be a positive integer, got {value}"):
        model_of(config | {name: value}, LLAMA, 1)


def test_costs_leave_room_for_kv_or_say_so():
    rates = {"bandwidth": 3e12, "most_running": 4, "kv_tokens": None, "step": None}
    found = costs(model_of(None, LLAMA, 1), GPUS["H100"], **rates)
    assert found.kv_tokens == int((0.86 * 80e9 - 15e9) / 131072)
    assert found.step == pytest.approx(0.006)
    with pytest.raises(ValueError, match="15 GB of weights leave no room.*--tp"):
        costs(model_of(None, LLAMA, 1), GPUS["H100"]._replace(memory=16e9), **rates)


@pytest.mark.parametrize(
    ("ratio", "reuse", "said"),
    [
        (0.6, 3.0, "It will help: "),
        (0.6, 1.04, "not by sharing: "),
        (0.94, 3.0, "It will help: "),
        (0.96, 3.0, "but reading it once gains a step too little."),
        (0.96, 1.04, "No difference: TPOT is 0.960 of FlashInfer's, inside its error"),
        (1.0, 3.0, "No difference: "),
        (1.04, 1.04, "No difference: "),
        (1.06, 1.04, "It will cost: "),
    ],
)
def test_the_verdict(run, ratio, reuse, said):
    done = run(trace_of((0, [1], 2)))
    stock, prefix = (
        replace(done, tpot=np.array([tpot], np.float32), reuse=reuse) for tpot in (1.0, ratio)
    )
    verdict = Findings(stock, prefix, 10.0).verdict
    assert said in verdict and f"{reuse:.2f}" in verdict


def test_a_server_that_falls_behind_is_said_to(run):
    trace = trace_of(*[(0.01 * i, [i], 50) for i in range(30)])
    done = run(trace, PLAIN._replace(most_running=2))
    text = printed(Findings(done, done, float(trace.arrival[-1])))
    assert f"Saturated: up to {done.waited} requests wait" in text and done.waited > 20
    slow = trace_of(*[(10.0 * i, [i], 50) for i in range(5)])
    done = run(slow)
    assert "Saturated" not in printed(Findings(done, done, float(slow.arrival[-1])))


def test_a_wait_in_between_and_a_long_last_answer_do_not_saturate(run):
    trace = trace_of((0, [1], 50), (0, [2], 50), (10, [3], 50), (11, [4], 5000))
    done = run(trace, PLAIN._replace(most_running=1))
    assert done.waited == 1 and done.seconds > 2 * trace.arrival[-1]
    assert "Saturated" not in printed(Findings(done, done, float(trace.arrival[-1])))


def printed(findings):
    console = Console(width=120, file=StringIO(), highlight=False)
    console.print(summary.render(findings))
    return console.file.getvalue()


@pytest.fixture
def many(tmp_path):
    """64 requests that share 4096 of 4608 prompt tokens."""
    file = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 4608, "output_length": 100, "hash_ids": [*range(8), 8 + i]}
        for i in range(64)
    ]
    file.write_bytes(b"\n".join(map(orjson.dumps, rows)) + b"\nno line\n")
    return file


def test_the_command(many, capsys):
    assert main.main(["analyze", str(many), "--gpu", "H200"]) == 0
    said = capsys.readouterr().out
    for part in (
        "64 requests over 0 s", "1 bad lines, left out:\n  line 65: no JSON",
        "512 tokens behind a hash id, as input_length / len(hash_ids) says",
        "NVIDIA H200", "Hopper kernels", "concurrent reuse 7.",
        "compared with: SGLang with FlashInfer's kernels for decode and prefill, where Hopper's "
        "default is FlashAttention 3", "100.0% of steps run prefix kernels",
        "TPOT p50, ms", "decode step p50, ms", "It will help: ",
    ):  # fmt: skip
        assert part in said, said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.jsonl"], "analyze: missing.jsonl: No such file"),
        (["--model", "missing", "--head-dim", "64"], "--head-dim: a --model has its own"),
        (["--heads", "6/4"], "multiple"),
        (["--model", "missing"], "--model: cannot read"),
        (["--gpu", "A100", "--kernels", "hopper"], "cannot run here (compute:8.0)"),
        (["--kv-tokens", "1000"], "no request fits a pool of 1,000"),
        (["--heads", "8/0"], "--heads 8/0: num_kv_heads must be a positive integer, got 0"),
        (["--rate", "1e-15"], "--rate 1e-15: the last request would come after 1e+12 s"),
    ],
)
def test_what_cannot_be_analyzed_is_said(arguments, message, many, capsys):
    given = arguments if arguments[0] == "missing.jsonl" else [str(many), *arguments]
    assert main.main(["analyze", *given]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads must be a positive integer, got 0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, got 0"),
    ],
)
def test_what_a_model_cannot_be_is_said(change, message, many, tmp_path, capsys):
    config = {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "intermediate_size": 14336, "vocab_size": 128256,
    }  # fmt: skip
    file = tmp_path / "config.json"
    file.write_bytes(orjson.dumps(config | change))
    assert main.main(["analyze", str(many), "--model", str(file)]) == 2
    error = capsys.readouterr().err
    assert "--model: " in error and str(file) in error and message in error


@pytest.mark.parametrize("option", ["--step-ms", "--rate"])
@pytest.mark.parametrize("value", ["1e300", "inf", "nan", "0", "-1", "x"])
def test_an_amount_that_nothing_takes_is_refused(option, value, many, capsys):
    with pytest.raises(SystemExit) as stopped:
        main.main(["analyze", str(many), f"{option}={value}"])
    assert stopped.value.code == 2 and f"argument {option}: " in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--kv-tokens", "--max-running-requests", "--tp"])
def test_a_count_that_no_int32_holds_is_refused(option, many, capsys):
    with pytest.raises(SystemExit) as stopped:
        main.main(["analyze", str(many), option, str(1 << 31)])
    assert stopped.value.code == 2
    assert f"{option}: must be at most 2147483647, got 2147483648" in capsys.readouterr().err


def test_the_time_unit_is_taken(tmp_path, capsys):
    file = tmp_path / "bailian.jsonl"
    rows = [
        {"timestamp": i, "input_length": 32, "output_length": 2, "hash_ids": [1, i]}
        for i in range(11)
    ]
    file.write_bytes(b"\n".join(map(orjson.dumps, rows)))
    assert main.main(["analyze", str(file)]) == 0
    said = capsys.readouterr().out
    assert "11 requests over 0 s" in said and "16 tokens behind a hash id" in said
    assert main.main(["analyze", str(file), "--time-unit", "seconds"]) == 0
    assert "11 requests over 10 s" in capsys.readouterr().out


def test_the_rate_that_is_simulated_is_said(tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'{"prompt": [1, 2, 3], "output_length": 4}\n' * 11)
    assert main.main(["analyze", str(file)]) == 0
    assert "11 requests over 0 s (no arrivals: all at once" in capsys.readouterr().out
    assert main.main(["analyze", str(file), "--rate", "5"]) == 0
    assert "11 requests over 2 s;" in capsys.readouterr().out


def test_a_file_without_requests(tmp_path, capsys):
    file = tmp_path / "empty.jsonl"
    file.write_text("x\n")
    assert main.main(["analyze", str(file)]) == 2
    error = capsys.readouterr().err
    assert "empty.jsonl" in error and "no request; line 1: no JSON" in error
