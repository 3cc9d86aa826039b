"""The library API refuses bad input with a ValueError that names the argument and the row."""

import math
import re
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from sgl_prefix_attn import PrefixAttentionWrapper
from sgl_prefix_attn.records import HeadConfig
from tests.support.forests import path_table
from tests.support.problems import assert_attention, make_problem
from tests.support.running import plan_wrapper, planned_wrapper, wrapper

HEADS = HeadConfig(8, 2, 32)


@contextmanager
def refused(message):
    """In the words of all refusals."""
    with pytest.raises(ValueError, match=message) as error:
        yield
    assert re.fullmatch(r"[a-z_]+(\[\d\])? must .+, got .+", str(error.value), re.DOTALL)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"heads": (7, 2, 32)}, r"num_qo_heads \(7\) must be a multiple of num_kv_heads \(2\)"),
        ({"heads": (0, 1, 32)}, "num_qo_heads must be a positive integer"),
        ({"heads": (8, 2, 8)}, "head_dim must be 16 to 256, got 8"),
        ({"heads": (8, 2, 512)}, "head_dim must be 16 to 256, got 512"),
        ({"heads": (8, 2.0, 32)}, "num_kv_heads must be a positive integer"),
        ({"page_size": 0}, "page_size must be an integer >= 1"),
        ({"page_size": 1.5}, "page_size must be an integer >= 1"),
        ({"page_size": True}, "page_size must be an integer >= 1, got True"),
        ({"device": "meta"}, "device must be a CPU or a CUDA GPU, got 'meta'"),
        ({"device": "abacus"}, "device must be a CPU or a CUDA GPU, got 'abacus'"),
        ({"device": None}, "device must be a CPU or a CUDA GPU, got 'None'"),
        ({"sm_scale": "x"}, "sm_scale must be a finite number, got 'x'"),
        ({"sm_scale": [0.1]}, "sm_scale must be a finite number"),
        ({"sm_scale": math.nan}, "sm_scale must be a finite number"),
        ({"sm_scale": 0}, "sm_scale must be positive, got 0.0"),
        ({"sm_scale": -0.1}, "sm_scale must be positive, got -0.1"),
        ({"dtype": torch.float64}, "dtype must be one of .*float32.*got torch.float64"),
        ({"dtype": torch.int8}, "dtype must be one of"),
        ({"kv_dtype": torch.float8_e5m2}, "kv_dtype must be torch.float8_e4m3fn, or None"),
        ({"kv_dtype": torch.float16}, "kv_dtype must be torch.float8_e4m3fn, or None"),
        ({"device": "cuda"}, "dtype must be float16 or bfloat16 on a GPU"),
        ({"strategy": "best"}, "strategy must be one of query, .*got 'best'"),
        ({"kernels": "cuda"}, "kernels must be auto, .* got 'cuda'"),
        ({"kernels": "hopper"}, "kernels, or .*kernels cannot run here .device:cpu"),
        ({"logits_soft_cap": -1.0}, "logits_soft_cap must be >= 0"),
        ({"logits_soft_cap": math.nan}, "logits_soft_cap must be a finite number"),
        ({"logits_soft_cap": math.inf}, "logits_soft_cap must be a finite number"),
        ({"logits_soft_cap": "x"}, "logits_soft_cap must be a finite number, got 'x'"),
    ],
)
def test_constructor_refuses(options, message):
    options = {"dtype": torch.float32, "heads": (8, 2, 32), "device": "cpu", **options}
    with pytest.raises(ValueError, match=message):
        PrefixAttentionWrapper(*options.pop("heads"), **options)


@pytest.mark.parametrize("kernels", ["auto", "portable"])
def test_heads_that_the_kernels_do_not_take_are_refused(kernels, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match="no kernels on cpu for group_size:129"):
        PrefixAttentionWrapper(129, 1, 64, device="cpu", dtype=torch.float16, kernels=kernels)


@pytest.mark.parametrize(
    ("gpus", "device", "there"),
    [
        (0, "cuda", "no CUDA GPU"),
        (0, "cuda:1", "no CUDA GPU"),
        (2, "cuda:2", "cuda:0 to cuda:1"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused_with_what_is(gpus, device, there, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(ValueError, match=f"device must .* torch .* sees, {there}, got"):
        PrefixAttentionWrapper(8, 2, 32, device=device, dtype=torch.bfloat16)


def plan_arguments():
    """Three requests, the first two share node 7; node 8 is the second's alone."""
    slots = torch.arange(1, 1 + 4 * 30, dtype=torch.int32).view(4, 30)
    slots[1, :10] = slots[0, :10]
    return {
        "paths": [[(7, 10)], [(7, 10), (8, 5)], []],
        "seq_lens": torch.tensor([12, 20, 5]),
        "req_to_token": slots,
        "req_pool_indices": torch.tensor([0, 1, 3]),
    }


def different_shared_slot():
    slots = plan_arguments()["req_to_token"]
    slots[1, 9] = 0
    return slots


def negative_slot():
    slots = plan_arguments()["req_to_token"]
    slots[3, 4] = -1
    return slots


NO_INT32 = torch.full((4, 30), 2**31)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"seq_lens": torch.tensor([], dtype=torch.int64), "paths": []}, "seq_lens must hold"),
        ({"seq_lens": [12, 0, 5]}, r"seq_lens\[1\] must be 1 to 2147483647, got 0"),
        ({"seq_lens": [12, 20, -5]}, r"seq_lens\[2\] must be 1 to .* got -5"),
        ({"seq_lens": [12, 20, 5.0]}, "seq_lens must be one-dimensional integers"),
        ({"seq_lens": [[12, 20, 5]]}, "seq_lens must be one-dimensional integers"),
        ({"seq_lens": torch.tensor(12)}, "seq_lens must be one-dimensional integers"),
        ({"seq_lens": [True, True, True]}, "seq_lens must be one-dimensional integers"),
        ({"seq_lens": [12, 31, 5]}, r"seq_lens\[1\] must be at most 30.* req_to_token .* got 31"),
        ({"seq_lens": [12, 20, 2**32 + 5]}, r"seq_lens\[2\] must be .* got 4294967301"),
        ({"seq_lens": [12, 20]}, "paths must have as many rows as seq_lens, 2, got 3"),
        ({"seq_lens": [10, 20, 5]}, r"paths\[0\] must hold at most 9 of the 10 tokens .* got 10"),
        ({"seq_lens": [12, 14, 5]}, r"paths\[1\] must hold at most 13 of the 14 tokens .* got 15"),
        (
            {"paths": [[(7, 10)], [(7, 11), (8, 5)], []]},
            r"paths\[1\] must have node 7.* got length 11",
        ),
        ({"paths": [[(7, 10)], [(8, 5), (7, 10)], []]}, r"paths\[1\] must have node 7"),
        ({"paths": [[(7, 4), (7, 4)], [], []]}, r"paths\[0\] must go down .* got node 7"),
        ({"paths": [[], [(7, 4), (8, 1), (7, 4)], []]}, r"paths\[1\] must go down .* got node 7"),
        ({"paths": [[(7, 10)], [(7, 10), (8, 0)], []]}, r"paths\[1\] .* length >= 1, got 8: 0"),
        ({"paths": [[(7, 10)], [(7, 10), (8, -2)], []]}, r"paths\[1\] .* length >= 1, got 8: -2"),
        ({"paths": [[(7, 10)], [(7, 10), (8, 2.5)], []]}, r"paths\[1\]"),
        ({"paths": [[(7, 10)], [(7, 10), (8, "5")], []]}, r"paths\[1\]"),
        ({"paths": [[(7, 10)], [(7, 10), ("b", 5)], []]}, r"paths\[1\]"),
        ({"paths": [[(7, 10)], [(7, 10), 8], []]}, r"paths\[1\]"),
        ({"paths": [[(7, 10)], [(7, 10), (8, 5, 1)], []]}, r"paths\[1\]"),
        ({"paths": [[], []]}, "paths must have as many rows as seq_lens, 3, got 2"),
        ({"paths": 5}, "paths must be a sequence, .* got 5"),
        ({"paths": torch.tensor(5)}, "paths must be a sequence, .* got tensor"),
        ({"paths": [None, [(7, 10)], []]}, r"paths\[0\] must hold pairs of integers"),
        ({"paths": [[(2**70, 10)], [], []]}, rf"paths\[0\] must .* fit int64, got {2**70}"),
        ({"paths": [[], [(-(2**63) - 1, 10)], []]}, r"paths\[1\] must .* fit int64, got -\d+"),
        ({"seq_lens": [[12], [20, 5]]}, "seq_lens must be one-dimensional integers"),
        ({"seq_lens": torch.ones(3, dtype=torch.bfloat16)}, "seq_lens must be one-dimensional"),
        ({"req_to_token": [[1, 2]] * 4}, "req_to_token must be a tensor, got list"),
        ({"req_pool_indices": [0, 1, 4]}, r"req_pool_indices\[2\] must be 0 to 3, got 4"),
        ({"req_pool_indices": [0, -1, 3]}, r"req_pool_indices\[1\] must be 0 to 3, got -1"),
        ({"req_pool_indices": [0, 1]}, "req_pool_indices must have as many rows .* got 2"),
        ({"req_pool_indices": [0.0, 1.0, 3.0]}, "req_pool_indices must be one-dimensional int"),
        ({"req_to_token": torch.zeros(4, 30)}, "req_to_token must be a two-dimensional int"),
        ({"req_to_token": torch.zeros(30, dtype=torch.int32)}, "req_to_token must be a two-dim"),
        ({"req_to_token": NO_INT32.to("meta")}, "req_to_token must be dense, on .* on meta"),
        ({"req_to_token": NO_INT32.to_sparse()}, "req_to_token must be dense, .* torch.sparse_coo"),
        ({"req_to_token": different_shared_slot()}, r"paths\[1\] .* request 0 .* got 0 to 10"),
        ({"req_pool_indices": [0, 2, 3]}, r"paths\[1\] .* request 0 .* got 0 to 10"),
        ({"req_to_token": negative_slot()}, "req_to_token must hold no neg.* request 2"),
        (
            {"req_to_token": NO_INT32},
            rf"req_to_token must hold slots up to {2**31 - 1}, got {2**31}",
        ),
    ],
)
def test_plan_refuses(change, message):
    made = wrapper(HEADS)
    made.plan(**plan_arguments())
    with refused(message):
        made.plan(**{**plan_arguments(), **change})


TABLE = torch.tensor([[1, 2, 3], [1, 2, 4]], dtype=torch.int32)


@pytest.mark.parametrize(
    "table, seq_lens, message",
    [
        (TABLE, [9, 13], r"seq_lens\[1\] must be at most 12.* block_table holds, got 13"),
        (TABLE, [9], "block_table must have as many rows as seq_lens, 1, got 2"),
        (TABLE, [], "seq_lens must hold at least one request"),
        (TABLE, [9, 0], r"seq_lens\[1\] must be 1 to .* got 0"),
        (TABLE.float(), [9, 9], "block_table must be a two-dimensional int"),
        (TABLE[0], [9, 9], "block_table must be a two-dimensional int"),
        (TABLE.tolist(), [9, 9], "block_table must be a tensor, got list"),
        (TABLE - 4, [9, 9], "block_table must hold no negative slots, got one .* request 0"),
        # what pages of 4 tokens would wrap into TABLE
        (TABLE.long() + 2**62, [9, 9], "block_table must hold slots up to"),
        (TABLE.long() - 2**62, [9, 9], "block_table must hold no negative slots"),
    ],
)
def test_plan_block_table_refuses(table, seq_lens, message):
    with refused(message):
        wrapper(HEADS, page_size=4).plan_block_table(table, seq_lens)


def test_block_table_entries_behind_the_last_page_are_ignored():
    table = TABLE.clone()
    table[0, 2] = -1
    wrapper(HEADS, page_size=4).plan_block_table(table, [8, 12])


def run_arguments(problem):
    out = torch.empty_like(problem.q)
    return {"q": problem.q, "kv_cache": (problem.k, problem.v), "out": out, "v_scale": 1.0}


CHANGES = [
    ("q", lambda t: t[:1], r"q must have shape \(2, 8, 32\), got \(1, 8, 32\)"),
    ("q", lambda t: t[:, :4], r"q must have shape"),
    ("q", lambda t: t.flatten(1), r"q must have shape"),
    ("q", lambda t: t.half(), "q must have the wrapper's dtype, torch.float32, got torch.float16"),
    ("q", lambda t: t.transpose(1, 2).contiguous().transpose(1, 2), "q must be contiguous"),
    ("v_scale", lambda scale: 0.5, "v_scale must be 1 for caches of the wrapper's dtype, got 0.5"),
    ("v_scale", lambda scale: math.inf, "v_scale must be a finite number"),
    ("out", lambda t: t[:1], "out must have shape"),
    ("out", lambda t: t.double(), "out must have the wrapper's dtype, .* got torch.float64"),
    ("out", lambda t: t[:1].expand_as(t), "out must have rows that do not overlap, got strides"),
    ("q", lambda t: t.tolist(), "q must be a tensor, got list"),
    ("q", lambda t: None, "q must be a tensor, got NoneType"),
    ("out", lambda t: t.numpy(), "out must be a tensor, got ndarray"),
    ("kv_cache", lambda kv: None, r"kv_cache must be a pair \(k, v\)"),
    ("kv_cache", lambda kv: (kv[0], None), r"kv_cache\[1\] must be a tensor, got NoneType"),
    ("kv_cache", lambda kv: kv[:1], r"kv_cache must be a pair \(k, v\)"),
    ("kv_cache", lambda kv: (kv[0][:, :1], kv[1]), r"kv_cache\[0\] must have shape \(slots, 2, 32"),
    ("kv_cache", lambda kv: (kv[0], kv[1][..., :16]), r"kv_cache\[1\] must have shape"),
    ("kv_cache", lambda kv: (kv[0], kv[1].bfloat16()), r"kv_cache\[1\] must .* got torch.bfloat16"),
    ("kv_cache", lambda kv: (kv[0][:5], kv[1]), r"kv_cache\[0\] must have slot \d+, .* got 5"),
    ("kv_cache", lambda kv: (kv[0], kv[1][:5]), r"kv_cache\[1\] must have slot \d+, .* got 5"),
    ("kv_cache", lambda kv: (kv[0].to("meta"), kv[1]), r"kv_cache\[0\] must be .* cpu, got meta"),
]


@pytest.mark.parametrize("name, change, message", CHANGES)
def test_run_refuses(name, change, message):
    problem = make_problem(path_table([(-1, 20)], [0, 0], [3, 4]), HEADS)
    made = planned_wrapper(problem)
    arguments = run_arguments(problem)
    arguments[name] = change(arguments[name])
    with refused(message):
        made.run(**arguments)


def test_outputs_have_memory_of_their_own():
    problem = make_problem(path_table([(-1, 20)], [0, 0], [3, 4]), HEADS)
    made = planned_wrapper(problem)
    arguments = run_arguments(problem)
    q, (k, v) = problem.q, arguments["kv_cache"]
    row = q[0].numel()
    longer = torch.cat([q, q, q]).flatten()
    for start in (0, row, row // 2, 2 * row - 8):  # a row later, half a row, a few elements
        shifted = longer[start:][: q.numel()].view_as(q)
        with refused("out must have memory of its own, got some of q's"):
            made.run(**arguments | {"q": longer[row:][: q.numel()].view_as(q), "out": shifted})
    pages = v.flatten()[: q.numel()].view_as(q)
    with refused(r"out must have memory of its own, got some of kv_cache\[1\]'s"):
        made.run(**arguments | {"out": pages, "kv_cache": (k, v)})
    with refused("out must have memory of its own"):  # rows of another stride
        made.run(**arguments | {"q": longer[: 2 * row * 2].view(2, 2, *q.shape[1:])[:, 0],
                                "out": longer[row:][: q.numel()].view_as(q)})  # fmt: skip
    want = made.run(**arguments)
    both = torch.stack([problem.q, arguments["out"]], dim=1)
    for one, other in ((0, 1), (1, 0)):
        both[:, one] = problem.q
        assert torch.equal(made.run(**arguments | {"q": both[:, one], "out": both[:, other]}), want)
    joined = longer[: 2 * q.numel()].view(2, *q.shape)
    assert torch.equal(made.run(**arguments | {"q": joined[0], "out": joined[1]}), want)


def test_a_numbered_cpu_is_the_cpu():
    problem = make_problem(path_table([(-1, 20)], [0, 0], [3, 4]), HEADS)
    made = wrapper(problem.heads, problem.dtype, "cpu:1")
    plan_wrapper(made, problem)
    want, arguments = made.run(problem.q, (problem.k, problem.v)), run_arguments(problem)
    with torch.device("meta"):  # nor does it matter where new tensors are made
        assert torch.equal(made.run(**arguments), want)


@pytest.mark.parametrize(
    "slots",
    [
        torch.tensor([1]), torch.tensor([[1, 2]]), torch.tensor([1, 2, 3]),
        torch.tensor([1.0, 2.0]), torch.tensor([1, -2]), [1, 2],
    ],
    ids=str,
)  # fmt: skip
def test_append_refuses(slots):
    problem = make_problem(path_table([(-1, 20)], [0, 0], [3, 4]), HEADS)
    made = planned_wrapper(problem)
    with refused("out_cache_loc"):
        made.append(slots)
    assert made.explain()["appended"] == 0
    assert_attention(problem, made.run(problem.q, (problem.k, problem.v)))


def test_slots_that_cannot_be_moved_append_nothing():
    problem = make_problem(path_table([(-1, 20)], [0, 0], [3, 4]), HEADS)
    made = planned_wrapper(problem)
    left = made.appends_left
    with pytest.raises(NotImplementedError):
        made.append(torch.zeros(2, dtype=torch.int64, device="meta"))
    assert made.appends_left == left and made.explain()["appended"] == 0


def test_of_one_head_the_stride_between_heads_is_anything():
    problem = make_problem(path_table([(-1, 20)], [0, 0], [3, 4]), HeadConfig(1, 1, 32))
    made = planned_wrapper(problem)
    q, *kv = (x.as_strided(x.shape, (32, 1, 1)) for x in (problem.q, problem.k, problem.v))
    assert q.is_contiguous()
    assert_attention(problem, made.run(q, kv))


def test_appended_slots_count_as_read():
    problem = make_problem(path_table([(-1, 20)], [0, 0], [3, 4]), HEADS)
    made = planned_wrapper(problem)
    made.append(torch.tensor([1, problem.k.shape[0]]))
    with refused(r"kv_cache\[0\] must have slot \d+, which the plan"):
        made.run(problem.q, (problem.k, problem.v))


def test_every_single_shared_slot_that_differs_is_found():
    parent, length, leaf = [-1, 0, 0, 1, -1], [5, 4, 3, 6, 7], [3, 3, 1, 2, 2, 0, 4, 4, -1]
    first_slot = np.cumsum([0, *length[:-1]]) + 1
    paths, rows = [], []
    for request, node in enumerate(leaf):
        path = []
        while node >= 0:
            path.insert(0, node)
            node = parent[node]
        shared = [first_slot[n] + i for n in path for i in range(length[n])]
        paths.append([(n, length[n]) for n in path])
        rows.append([*shared, *range(100 + 30 * request, 130 + 30 * request)][:30])
    slots = torch.tensor(rows, dtype=torch.int32)
    seq_lens = [sum(tokens for _, tokens in path) + 2 for path in paths]
    made = wrapper(HEADS)
    made.plan(paths, seq_lens, slots, range(9))
    requests_below = {n: sum(n in dict(path) for path in paths) for n in range(5)}
    for row, path in enumerate(paths):
        shared = sum(tokens for n, tokens in path if requests_below[n] > 1)
        for position in range(shared):
            wrong = slots.clone()
            wrong[row, position] = 999
            with refused(r"paths\[\d\] must share with request \d"):
                made.plan(paths, seq_lens, wrong, range(9))
