"""How eval.bench_kernel judges and times: planted faults are seen, providers take turns."""

import sys
import types
from dataclasses import replace

import pytest
import torch

from eval.bench_kernel import behind_products, compare_providers, providers, turns
from eval.bench_kernel import case as case_module
from eval.bench_kernel.case import build_case
from eval.bench_kernel.compare_providers import compare
from eval.bench_kernel.oracle import attend
from eval.bench_kernel.providers import make_providers
from eval.bench_kernel.providers.provider import Runnable
from eval.bench_kernel.turns import Candidate, Entry
from sgl_prefix_attn.engine.determinism import PART_TOKENS
from sgl_prefix_attn.execute import row_sums
from sgl_prefix_attn.execute.executor import PlanExecutor
from sgl_prefix_attn.records import HeadConfig
from sgl_prefix_attn.tools.calibrate.stock_decode import tensor_cores
from tests.eval.kernel_settings import CPU, H100, HEADS, setting_of
from tests.eval.plain_torch import PlainTorch


class Changed(PlainTorch):
    """Plain torch that keeps its outputs, as most providers do, with its runs changed by
    `change(provider, case, layer, run)`; counts runs and plans."""

    def __init__(self, change, name="changed"):
        super().__init__(name)
        self._change, self.runs, self.plans, self.outs = change, 0, 0, {}

    def prepare(self, case):
        runnable, outs = super().prepare(case), case.new_out()
        attend, self.runs, self.plans, self.layers = runnable.run, 0, 1, case.num_layers

        def run(layer):
            self.runs += 1
            return self._change(self, case, layer, lambda i: outs[layer].copy_(attend(i)))

        def plan():
            self.plans += 1

        runnable.run, runnable.plan, runnable.outs = run, plan, outs
        return runnable


def status_of(change, tree="1,4_32,16"):
    provider = Changed(change)
    (row,) = compare(setting_of(tree), [provider], H100)
    assert (row["us"] is None) == (row["us_rounds"] is None) == (row["plan_us"] is None)
    assert (row["us"] is None) == (row["status"] != "ok")
    return row["status"], provider


E4M3 = torch.float8_e4m3fn


class Narrowing(PlainTorch):
    """Plain torch that rounds queries and probabilities to the KV cache's dtype."""

    def __init__(self, narrows):
        super().__init__("narrowing")
        self.narrows = narrows

    def prepare(self, case):
        def run(layer):
            arguments = case.k[layer], case.v[layer], torch.float32, case.dtype
            return attend(case, *arguments, narrow=case.kv_dtype)

        return Runnable(run)


def test_a_narrow_cache_is_half_the_floor_and_is_read_as_it_is():
    wide, narrow = setting_of("1,4_320,16"), setting_of("1,4_320,16", kv_dtype=E4M3)
    prefix = make_providers(["prefix"])
    rows = [row for setting in (wide, narrow) for row in compare(setting, prefix, H100)]
    assert [(row["dtype"], row["status"]) for row in rows] == [("bf16", "ok"), ("fp8_e4m3", "ok")]
    assert rows[0]["floor_us"] == pytest.approx(2 * rows[1]["floor_us"], abs=2e-3)


def test_rounded_queries_are_wrong_but_for_those_that_are_known_to_round():
    setting = setting_of("1,4_320,16", kv_dtype=E4M3)
    told, untold = (
        row for narrows in (True, False) for row in compare(setting, [Narrowing(narrows)], H100)
    )
    assert told["status"] == "ok" and 0.01 < told["error"] < 0.1
    assert untold["status"].startswith("wrong") and untold["error"] == told["error"]


def right(provider, case, layer, run):
    return run(layer)


def drop_last_token(provider, case, layer, run):
    out = run(layer)
    slots = case.req_to_token[0, :-1].long()
    k, v = case.k[layer][slots].float(), case.v[layer][slots].float()
    q = case.q[0].float().unflatten(0, (2, 2))
    weights = torch.softmax(torch.einsum("hgd,thd->hgt", q, k) * case.sm_scale, -1)
    out[0] = torch.einsum("hgt,thd->hgd", weights, v).flatten(0, 1).to(out.dtype)
    return out


def swap_two_rows(provider, case, layer, run):
    return run(layer)[[1, 0, *range(2, case.batch_size)]]


def leave_one_head_unwritten(provider, case, layer, run):
    out = run(layer)
    out[-1, -1] = float("nan")
    return out


def read_layer_0_in_every_layer(provider, case, layer, run):
    return run(0)


def zero_layer_1(provider, case, layer, run):
    return run(layer).zero_() if layer == 1 else run(layer)


def test_a_right_provider_is_timed():
    status, provider = status_of(right)
    assert status == "ok" and provider.plans > 2


@pytest.mark.parametrize("fault", [drop_last_token, swap_two_rows, leave_one_head_unwritten])
def test_a_wrong_provider_is_shown_and_not_timed(fault):
    status, provider = status_of(fault, "1,4_1024,1000")
    assert status.startswith("wrong: first run, layer 0: ")
    assert provider.plans == 1 and provider.runs == provider.layers, "judged once, never timed"


def compute_layer_0_alone(provider, case, layer, run):
    return run(0) if layer == 0 else torch.full_like(case.q, float("nan"))


def compute_layer_0_alone_later(provider, case, layer, run):
    """The outputs of the first run are still in place: they must not pass for new ones."""
    if provider.plans == 1 or layer == 0:
        provider.outs[layer] = run(layer)
    return provider.outs[layer]


def swap_rows_after_another_plan(provider, case, layer, run):
    return (swap_two_rows if provider.plans > 1 else right)(provider, case, layer, run)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (read_layer_0_in_every_layer, "first run, layer 1: "),
        (zero_layer_1, "first run, layer 1: "),
        (compute_layer_0_alone, "first run, layer 1: row 0 is off by nan"),
        (compute_layer_0_alone_later, "planned again, layer 1: row 0 is off by nan"),
        (swap_rows_after_another_plan, "planned again, layer 0: "),
    ],
)
def test_every_layer_of_every_run_is_judged_by_its_own_kv(fault, says):
    assert status_of(fault)[0].startswith(f"wrong: {says}")


def test_what_is_timed_is_judged_before_and_after():
    """Runs of a capture are those after the two that judge the plans, see Candidate."""

    def wrong_from(run_of_layer):
        def change(provider, case, layer, run):
            late = provider.runs > run_of_layer * case.num_layers
            return (swap_two_rows if late else right)(provider, case, layer, run)

        return change

    assert status_of(wrong_from(2))[0].startswith("wrong: captured, layer 0")
    assert status_of(wrong_from(3))[0].startswith("wrong: timed, layer 0")


def test_providers_take_turns_in_both_orders(monkeypatch):
    calls, times = [], iter([5.0, 50.0, 70.0, 9.0, 7.0, 60.0])

    def us(self):
        calls.append(self.name)
        return next(times)

    class Named(Candidate):
        def __init__(self, provider, *rest):
            super().__init__(provider, *rest)
            self.name = provider.name

    monkeypatch.setattr(Named, "us", us)
    monkeypatch.setattr(turns, "Candidate", Named)
    providers = [Changed(right, "a"), Changed(right, "b")]
    a, b = compare(setting_of("1,4_32,16"), providers, H100)
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert (a["us"], a["us_rounds"]) == (7.0, [5.0, 9.0, 7.0])
    assert (b["us"], b["us_rounds"]) == (60.0, [50.0, 70.0, 60.0])


class FakeProfile:
    """Stands for the profiler: of what `ran`, a product takes 10 us, attention two kernels of 3 and
    4 with 1 between them, and 2 are between all others."""

    def __init__(self, ran):
        self.ran = ran

    def kernels_of(self, work):
        del self.ran[:]
        work()
        found, now = [], 0.0
        for what in self.ran:
            for name, us, gap in {"product": [("gemm", 10, 2)]}.get(
                what, [("split", 3, 1), ("merge", 4, 2)]
            ):
                found.append(behind_products.Kernel(now, now + us, name))
                now += us + gap
        return found


def test_behind_products_attention_alone_is_timed(monkeypatch):
    ran, mm = [], torch.mm
    for name, width in {"_HIDDEN": 8, "_INNER": 16, "_QKV": 12}.items():
        monkeypatch.setattr(behind_products, name, width)
    monkeypatch.setattr(behind_products, "_operands", behind_products._operands.__wrapped__)
    monkeypatch.setattr(torch, "mm", lambda x, weights: ran.append("product") or mm(x, weights))
    monkeypatch.setattr(behind_products, "kernels_of", FakeProfile(ran).kernels_of)
    setting = replace(setting_of("1,4_32,16"), behind_products=True)

    def noted(provider, case, layer, run):
        ran.append("attention")
        return run(layer)

    (row,) = compare(setting, [Changed(noted)], H100)
    assert row["status"] == "ok" and row["timing"] == "eager, behind products"
    assert row["us_rounds"] == [8.0, 8.0, 8.0]
    assert ran == [*["product"] * 4, "attention"] * (len(ran) // 5)
    (row,) = compare(setting, [Changed(read_layer_0_in_every_layer)], H100)
    assert row["status"].startswith("wrong")

    def with_a_product(provider, case, layer, run):
        ran.extend(["attention", "product", "attention"])
        return run(layer)

    (row,) = compare(setting, [Changed(with_a_product)], H100)
    assert row["status"].startswith("failed: RuntimeError") and row["us"] is None


def test_what_stands_between_products_is_one_span():
    kernels = [
        behind_products.Kernel(*of)
        for of in ((0, 3, "a"), (3, 9, "gemm"), (9, 10, "gemm"), (11, 15, "a"), (12, 20, "b"),
                   (21, 30, "gemm"), (31, 33, "a"))
    ]  # fmt: skip
    assert behind_products.spans(kernels, {"gemm"}) == [3, 9, 2]
    assert behind_products.spans([], {"gemm"}) == []


def fail_when_timed(provider, case, layer, run):
    if provider.runs > 3 * case.num_layers:
        raise RuntimeError("launch failed")
    return run(layer)


def test_a_provider_that_raises_is_a_line_and_the_others_go_on():
    class Broken(PlainTorch):
        def prepare(self, case):
            raise OSError("no such kernel")

    providers = [Broken("broken"), Changed(fail_when_timed, "late"), Changed(right, "right")]
    rows = {row["provider"]: row for row in compare(setting_of("1,4_32,16"), providers, H100)}
    assert rows["broken"]["status"] == "failed: OSError: no such kernel"
    assert (
        rows["late"]["status"] == "failed: RuntimeError: launch failed"
        and rows["late"]["us"] is None
    )
    assert rows["right"]["status"] == "ok" and len(rows["right"]["us_rounds"]) == turns.ROUNDS


@pytest.mark.parametrize("raises", [True, False])
def test_an_error_that_stays_is_a_line_of_every_provider(monkeypatch, raises):
    """As after an illegal access: what follows fails at its first synchronisation."""
    entries = [Entry(PlainTorch(), {"status": "ok"}) for _ in range(2)]

    def synchronize():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def step(entry):
        if raises and entry is entries[0]:
            raise ValueError("bad launch")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    for entry in entries:
        turns._attempt(step, entry, torch.device("cuda"))
    first = "ValueError: bad launch" if raises else "RuntimeError: CUDA error"
    assert entries[0].row["status"].startswith(f"failed: {first}")
    assert entries[1].row["status"].startswith("failed: RuntimeError: CUDA error")


class Paged(PlainTorch):
    def page_size(self, requested):
        return max(32, requested)


def test_page_sizes_are_timed_together_while_their_pools_fit(monkeypatch):
    setting, providers = setting_of("1,4_32,16"), [Paged("paged"), PlainTorch()]
    (group,) = compare_providers._groups(setting, providers)
    assert [p.name for p in group] == ["torch", "paged"]
    monkeypatch.setattr(compare_providers, "_MAX_POOL_BYTES", 1e5)
    groups = compare_providers._groups(setting, providers)
    assert [[p.name for p in group] for group in groups] == [["torch"], ["paged"]]
    rows = list(compare(setting, providers, H100))
    assert [(row["provider"], row["status"], row["run_page_size"]) for row in rows] == [
        ("torch", "ok", None), ("paged", "ok", 32)
    ]  # fmt: skip


def test_flashinfer_decodes_with_tensor_cores_as_sglang_decides():
    for dtype, wanted in ((torch.bfloat16, [1, 1, 0, 0]), (torch.float16, [1, 1, 0, 0]),
                          (torch.float32, [0, 0, 0, 0]), (E4M3, [1, 1, 1, 1])):  # fmt: skip
        heads = [HeadConfig(*counts, 128) for counts in ((32, 8), (64, 8), (16, 8), (32, 32))]
        assert [tensor_cores(config, dtype) for config in heads] == wanted


@pytest.mark.parametrize(("provider", "splits"), [("fa3", 0), ("fa3:one_split", 1)])
def test_fa3_reads_one_schedule_for_all_layers_that_a_plan_renews_in_place(
    provider, splits, monkeypatch
):
    asked, given = [], []

    def get_scheduler_metadata(**kwargs):
        asked.append(kwargs)
        return torch.full((17,), len(asked), dtype=torch.int32)

    module = types.SimpleNamespace(
        flash_attn_with_kvcache=lambda **kwargs: given.append(kwargs),
        get_scheduler_metadata=get_scheduler_metadata,
    )
    monkeypatch.setitem(sys.modules, "sgl_kernel", types.SimpleNamespace(flash_attn=module))
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_attn", module)
    setting = setting_of("1,4_32,16", page_size=16)
    case = build_case(setting.tree, HEADS, 16, torch.bfloat16, setting.device)
    runnable = make_providers([provider])[0].prepare(case)
    for layer in (0, 1):
        runnable.run(layer)
    runnable.plan()
    runnable.run(0)
    schedules = [call["scheduler_metadata"] for call in given]
    assert len({schedule.data_ptr() for schedule in schedules}) == 1
    assert len({call["page_table"].data_ptr() for call in given}) == 1
    assert len(asked) == 2 and schedules[0].tolist() == [2] * 17
    names = ("batch_size", "max_seqlen_k", "page_size", "num_heads", "num_heads_k", "headdim")
    assert [asked[1][name] for name in names] == [4, 48, 16, 4, 2, 32]
    assert asked[1]["num_splits"] == given[0]["num_splits"] == splits
    assert asked[1]["causal"] is given[0]["causal"] is True


def test_providers_of_this_library_are_told_apart():
    names = ["prefix", "prefix:portable", "prefix:pat", "prefix:merged", "prefix:hopper"]
    providers = make_providers(names)
    assert [provider.name for provider in providers] == names
    case = build_case(setting_of("1,4_640,16").tree, HEADS, 1, torch.float32, CPU)
    made = [provider.prepare(case) for provider in providers[:4]]
    assert all(torch.allclose(made[0].run(0), other.run(0), atol=1e-5) for other in made[1:])
    assert made[2].facts["num_partials"] > made[3].facts["num_partials"], "nodes are split off"
    with pytest.raises(ValueError, match="cannot run here"):
        providers[4].prepare(case)


@pytest.mark.slow
def test_the_deterministic_mode_is_judged_as_every_provider(monkeypatch):
    """In parts of which requests have several."""
    monkeypatch.setattr(providers, "PART_TOKENS", 128)
    monkeypatch.setattr(case_module, "_POOL_BYTES", 0)  # two layers: the interpreter is slow
    monkeypatch.setattr(turns, "_PLANS", 1)
    setting = setting_of("1,2,6_90,70,50")
    invariant, default = make_providers(["prefix:invariant", "prefix"])
    rows = list(compare(setting, [invariant, default], H100))
    assert [row["status"] for row in rows] == ["ok", "ok"]
    assert rows[0]["num_items"] > rows[0]["tiles"] and rows[0]["family"] == "portable"
    case = build_case(setting.tree, HEADS, 1, torch.bfloat16, CPU)
    assert invariant.prepare(case).planner.part_tokens == 128
    monkeypatch.setattr(row_sums, "merged", lambda parts: parts[0])
    (row,) = compare(setting, [invariant], H100)
    assert row["status"].startswith("wrong: first run")


def test_a_grown_plan_is_judged_as_every_provider(monkeypatch):
    monkeypatch.setattr(case_module, "_POOL_BYTES", 0)
    monkeypatch.setattr(turns, "_PLANS", 1)
    grown, default = make_providers(["prefix:grown", "prefix"])
    rows = list(compare(setting_of("1,2,6_90,70,50"), [grown, default], H100))
    assert [row["status"] for row in rows] == ["ok", "ok"]
    assert rows[0]["kv_tokens_read"] == rows[1]["kv_tokens_read"]
    assert rows[0]["predicted_us"] is None
    (row,) = compare(setting_of("1,2,6_90,70,32"), [grown], H100)
    assert "has not grown by 32 tokens" in row["status"]
    monkeypatch.setattr(PlanExecutor, "append", lambda *_: None)
    (row,) = compare(setting_of("1,2,6_90,70,50"), [grown], H100)
    assert row["status"].startswith("wrong: first run")


def test_a_deterministic_servers_parts_are_timed():
    case = build_case(setting_of("1,4_3060,16").tree, HEADS, 1, torch.float32, CPU)
    made = make_providers(["prefix:invariant"])[0].prepare(case)
    assert made.stats.num_items > made.stats.num_tiles
    assert made.planner.part_tokens == PART_TOKENS
