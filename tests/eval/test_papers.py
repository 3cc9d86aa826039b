"""eval.papers: batches, counts, descriptions and the table; on the CPU a tiny run."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from eval import provenance, report
from eval.bench_kernel import floor
from eval.bench_kernel.floor import Rates
from eval.papers import __main__ as command
from eval.papers import batches, derived, figures, measure, paper_tables
from eval.papers.batches import unshared
from eval.papers.experiment import LLAMA3, Claim
from eval.papers.experiments import EXPERIMENTS, find
from sgl_prefix_attn.records import HeadConfig

CPU = torch.device("cpu")
RATES = Rates(1e12, 1e15, "test")
HEADS = HeadConfig(7, 1, 16)
RAGGED = unshared("ragged", [1, 63, 37, 130])
META = provenance.collect("eval.papers", ["all"])


# --- descriptions -------------------------------------------------------------------------------
@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=EXPERIMENTS)
def test_an_experiment_is_described_completely(experiment):
    assert experiment.place and experiment.claims and experiment.missing
    kinds = [experiment.runs, experiment.count, experiment.derive]
    assert sum(map(bool, kinds)) == 1 and bool(experiment.derive) == bool(experiment.source)
    assert experiment.name in experiment.command
    assert all(claim.says and claim.paper and claim.expected for claim in experiment.claims)
    assert len({claim.says for claim in experiment.claims}) == len(experiment.claims)


def rows_of(experiment, **facts):
    """Rows as far as they are known before a run, and facts that a run adds."""
    known = [measure.row(run, name, RATES) for run in experiment.runs for name in measure.PROVIDERS]
    counted = experiment.count() if experiment.count else []
    return [row | facts | {"us": row.get("floor_us")} for row in [*known, *counted]]


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=EXPERIMENTS)
def test_its_batches_build(experiment):
    for run in experiment.runs:
        paths = run.batch.paths
        assert paths.seq_lens.min() >= 1 and run.batch.unique_tokens <= run.batch.tokens


def test_a_claim_reads_batches_that_are_run():
    """With every time at hand, no figure of a kernel experiment lacks rows."""
    for experiment in find(["kernels"]):
        rows = rows_of(experiment, server_runs="prefix", launches=1, merge_bytes=10**6)
        for claim in experiment.claims:
            assert claim.figure(rows) != figures.MISSING, (experiment.name, claim.says)


def test_names():
    assert find(["pat-kernels", "kernels"]) == find(["kernels"]) != find(["pat-kernels"])
    assert len(find(["kernels", *EXPERIMENTS])) == len(EXPERIMENTS)
    assert not any(e.derive for e in find(["kernels"]))


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["pat"], "invalid choice: 'pat' (choose from"),
        (["pat-traces"], "pat-traces: needs --from, a result file of python -m eval.bench_serving"),
        (["pat-kernels", "--from", "x.json"], "--from goes with one experiment"),
        (["pat-traces", "--from", "missing.json"], "missing.json is not a result file"),
    ],
)
def test_bad_arguments(argv, says, capsys):
    with pytest.raises(SystemExit):
        command.main(argv)
    assert says in " ".join(capsys.readouterr().err.split())


# --- batches and counts -------------------------------------------------------------------------
def test_the_bimodal_step_reads_what_the_papers_did():
    sets = {batch.name: batch for batch in batches.active_sets()}
    for name in ("bimodal 8", "uniform 8", "zipf 8"):
        assert floor.kv_bytes(sets[name].tokens, LLAMA3) == 550_502_400  # 550.5 MB, Table 3
    assert sets["bimodal 8"].size == 8 and sets["bimodal 4"].size == 4
    assert sets["zipf 8"].paths.seq_lens[0] // sets["zipf 8"].paths.seq_lens[1] == 2


def test_a_mix_and_its_even_twin_have_as_many_tokens():
    pairs = {batch.name: batch for batch in batches.mixes()}
    for name in ("alpaca 256", "lmsys 64", "lmsys 256", "text2sql 256"):
        mixed, even = pairs[name], pairs[f"{name} even"]
        assert (mixed.tokens, mixed.unique_tokens) == (even.tokens, even.unique_tokens)
        assert np.ptp(even.paths.seq_lens) <= 1 < np.ptp(mixed.paths.seq_lens)
    # More than 60 % of prompts are shorter than 128 tokens (PackInfer, Figure 3).
    assert (pairs["alpaca 256"].paths.seq_lens < 128).mean() > 0.6
    shared = pairs["text2sql 256"]
    assert shared.tokens - shared.unique_tokens == (256 - 16) * 600


def test_a_completion_is_taken_in_its_middle():
    assert batches.completing(4096, prompt=4096) == "1,32_4096,32"
    assert batches.completing(1024, 512, 16) == "1,16_1024,1280"
    assert batches.completing(0, 2048, 128, 512) == "128_1536"


def test_bytes_and_operations_of_a_hand_counted_batch():
    (batch,) = batches.trees("1,2_100,10")  # 2 requests of 110, 120 tokens once
    heads = HeadConfig(4, 2, 8)
    assert (batch.tokens, batch.unique_tokens) == (220, 120)
    assert floor.kv_bytes(120, heads) == 120 * 2 * 8 * 2 * 2
    assert floor.flops(batch, heads) == 220 * 4 * 8 * 4
    assert derived.merge_bytes(3, heads) == 3 * 4 * (8 * 2 + 8)
    assert floor.floor_us(batch, heads, Rates(1e6, 1e12, "")) == pytest.approx(7680)
    assert floor.floor_us(batch, heads, Rates(1e12, 1e6, "")) == pytest.approx(28160)


def test_memory_is_that_of_the_papers_table():
    assert derived.LLAMA2_TOKEN_BYTES == 524_288 and derived.LLAMA3_TOKEN_BYTES == 131_072
    found = {(row["batch"], row["provider"]): row["kv_gb"] for row in derived.memory()}
    # 16 x (4096 + 256) and 4096 + 11 x 256 tokens of 0.5 MiB; the paper saw 35.42 and 4.00 GB.
    assert found["Llama2-7B, peak batch", "copies"] == pytest.approx(69_632 * 524_288 / 1e9)
    assert found["Llama2-7B, peak batch", "shared"] == pytest.approx(6_912 * 524_288 / 1e9)
    apart, together = (found["Llama-3.1-8B, 32 requests", x] for x in ("copies", "shared"))
    assert together / apart == pytest.approx(12_288 / 139_264)


# --- figures and the table ----------------------------------------------------------------------
def timed(batch, provider, us, **more):
    return {
        "experiment": "pat-kernels", "batch": batch, "heads": "32/8", "provider": provider,
        "status": "ok", "us": us, "floor_us": 1.0, **more,
    }  # fmt: skip


ROWS = [
    timed("1,4_8,8", "prefix", 2.0, server_runs="prefix", launches=1),
    timed("1,4_8,8", "flashinfer", 8.0),
    timed("1,4_8,8", "fa3", 16.0),
    timed("4_8", "prefix", 10.0, server_runs="stock"),
    timed("4_8", "flashinfer", 9.0),
    timed("4_8", "fa3", None),
]


def test_figures():
    def of(figure):
        return figure(ROWS)

    assert of(figures.ratio_most("flashinfer")) == "4.0"
    assert of(figures.ratio_each("flashinfer")) == "4.00, 0.90"
    assert of(figures.ratio_mean("flashinfer")) == "1.90"
    assert of(figures.ratio_span(("flashinfer", "fa3"))) == "0.90 to 8.00"
    assert of(figures.less_span("fa3")) == "87.5 %"
    assert of(figures.less_span(("flashinfer", "fa3"), only=figures.shares)) == "75.0 % to 87.5 %"
    assert of(figures.less_mean("flashinfer", only=figures.is_unshared)) == "-11.1 %"
    assert of(figures.more_mean("fa3")) == "700.0 %"
    assert of(figures.policy_each()) == "4.00, 1.00"
    assert of(figures.between(("4_8", "flashinfer"), ("1,4_8,8", "prefix"), 2)) == "9.00"
    assert of(figures.bandwidth_share("prefix")) == "10 % to 50 %"
    assert of(figures.fact("launches", "prefix", "1,4_8,8")) == "1"
    for figure in (figures.ratio_most("pat"), figures.fact("us", "pat", "4_8"),
                   figures.between(("4_8", "fa3"), ("4_8", "prefix")),
                   figures.bandwidth_share("pat")):  # fmt: skip
        assert of(figure) == figures.MISSING
    assert figures.policy_each()([]) == figures.MISSING


def test_the_table_has_the_papers_numbers_beside_ours(tmp_path, capsys):
    kernels, counted = tmp_path / "kernels.json", tmp_path / "counted.json"
    provenance.save(kernels, META, [*ROWS[:-1], ROWS[-1] | {"status": "failed: no such kernel"}])
    rows = [{"experiment": "chunkattention-memory"} | row for row in derived.memory()]
    provenance.save(counted, META, rows)
    assert report.main([str(kernels), str(counted)]) == 0
    text = capsys.readouterr().out
    assert "PAT, Figure 9, section 8.3 | largest speedup over FlashAttention" in text
    assert "| 22.7 | 18.7 | 8.0 |" in text and "| 12.0 | 18.7 | 4.0 |" in text
    assert "| 35.42 | 36.51 |  | 36.51 |" in text
    assert "- `pat-kernels`, `4_8`, fa3: failed: no such kernel" in text
    assert "- `python -m eval.papers pat-kernels`" in text
    assert "`kernels.json`" in text and "`counted.json`" in text


def test_rows_of_an_unknown_experiment_are_refused():
    with pytest.raises(ValueError, match="experiment 'pat-10': known are pat-kernels"):
        paper_tables.markdown([timed("4_8", "prefix", 1.0) | {"experiment": "pat-10"}])


def test_an_expectation_in_words_stands_in_its_column(monkeypatch):
    claim = Claim("x", "1", figures.ratio_most("fa3"), "a lot")
    made = replace(EXPERIMENTS["pat-kernels"], claims=(claim,))
    monkeypatch.setitem(EXPERIMENTS, "pat-kernels", made)
    (row,) = paper_tables.figures(ROWS)
    assert (row["paper"], row["expected"], row["measured"]) == ("1", "a lot", "8.0")


# --- other benchmarks' files --------------------------------------------------------------------
def test_ablations_become_times_and_bytes(tmp_path, capsys):
    rows = [
        {"tree": "1,2_8,8", "heads": "32/8", "head_dim": 128, "provider": f"prefix:{name}",
         "status": "ok", "us": us, "kv_tokens_read": 1000, "num_partials": partials}
        for name, us, partials in (
            ("portable", 10.0, 0), ("compute", 12.0, 24), ("cut1", 5.0, 0), ("tile_64", 6.0, 0),
        )
    ]  # fmt: skip
    rows.append(rows[1] | {"provider": "prefix:naive", "status": "wrong: x", "us": None})
    source = tmp_path / "kernels.json"
    provenance.save(source, META | {"gpu": "NVIDIA H200", "command": "kernels"}, rows)
    out = tmp_path / "out.json"
    argv = ["pat-ablations", "--from", str(source), "--json", str(out)]
    assert command.main(argv) == 0
    text = capsys.readouterr().out
    assert "(a) PAT-compute, more latency | 4.6 % | 29 % | 20.0 % |" in text
    assert "tiles of 64 rows | 39 % | 4 % | 20.0 % |" in text, "of one family"
    assert "(b) PAT-compute, more bytes | 10.9 % | counted |  | 9.9 % |" in text  # 4.096 + 0.406 MB
    assert "`1,2_8,8`, naive: wrong: x" in text
    meta = provenance.load(out)["meta"]
    assert meta["gpu"] == "NVIDIA H200" and meta["command"].startswith("kernels && python -m eval")
    with pytest.raises(SystemExit):
        command.main(["pat-traces", "--from", str(source)])
    assert "is no result of python -m eval.bench_serving" in capsys.readouterr().err


def test_servers_become_ratios():
    def row(backend, tpot, steps, load="agent"):
        return {"backend": backend, "load": load, "rate": "70%", "sent": 3, "completed": 3,
                "tpot_ms": {"p50": tpot}, "ttft_ms": {"mean": 5.0}, "e2e_ms": {"mean": 9.0},
                "steps": steps, "planning_s": 0.02}  # fmt: skip

    rows = [row("prefix", 8.0, {"prefix:x": 60, "stock:y": 40}), row("default", 10.0, {}),
            row("default", 99.0, {}, "gsp")]  # fmt: skip
    whole = row("prefix", 8.0, {}) | {"rate": "offline", "tpot_ms": None, "ttft_ms": None}
    found = derived.serving([*rows, whole])
    assert [r["batch"] for r in found] == ["agent at 70%"] * 2
    assert found[0]["planning_share"] == pytest.approx(0.2 / 8)  # 0.2 ms a step of 8 ms
    assert found[1]["planning_share"] is None
    texts = [claim.figure(found) for claim in EXPERIMENTS["pat-overhead"].claims]
    assert texts == ["2.5 %", "-"]
    assert EXPERIMENTS["pat-traces"].claims[0].figure(found) == "20.0 %"


# --- without a GPU ------------------------------------------------------------------------------
def test_what_is_counted_needs_no_gpu(tmp_path, capsys):
    out = tmp_path / "out.json"
    assert command.main(["chunkattention-memory", "--json", str(out)]) == 0
    assert "| 35.42 | 36.51 |  | 36.51 |" in capsys.readouterr().out
    result = provenance.load(out)
    assert {row["status"] for row in result["rows"]} == {"counted"}
    assert result["figures"][0] == {
        "experiment": "chunkattention-memory", "figure": "peak KV, GB: vLLM, 16 requests",
        "paper": "35.42", "expected": "36.51", "measured": "", "counted": "36.51",
    }  # fmt: skip


def test_kernels_need_one(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        command.main(["kernels"])
    assert "kernels are timed on an NVIDIA GPU" in capsys.readouterr().err
