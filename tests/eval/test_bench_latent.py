"""eval.bench_latent on the CPU: the torch interpreter stands for the kernel, and plain torch, which
reads what it is given as the libraries would, for SGLang's."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from eval import provenance
from eval.bench_kernel.case import build_case
from eval.bench_kernel.floor import flops, kv_bytes
from eval.bench_kernel.providers import latent, planned
from eval.bench_kernel.providers.planned import PlannedRunnable
from eval.bench_kernel.trees import Tree
from eval.bench_latent import main
from sgl_prefix_attn.records import HeadConfig

ARGS = ["--device", "cpu", "--heads", "4", "--dims", "24,16", "--trees", "1,5_70,9"]
HEADS = HeadConfig(4, 1, 24, 16)


def test_a_run_is_written_with_what_is_missing(tmp_path):
    out = tmp_path / "out.json"
    assert main([*ARGS, "--json", str(out)]) == 0
    ours, *others = provenance.load(out)["rows"]
    assert ours["provider"] == "prefix" and ours["status"] == "ok" and ours["us"] > 0
    assert [row["provider"] for row in others] == ["fa3", "flashinfer:mla", "flashmla"]
    assert all(row["status"].startswith("unavailable: needs an NVIDIA GPU") for row in others)


@pytest.mark.parametrize("spoil", ["scale", "row"])
def test_wrong_outputs_have_no_time(spoil, monkeypatch, capsys):
    right = PlannedRunnable.run

    def run(self, layer):
        out = right(self, layer)
        if spoil == "scale":
            out *= 1.1
        else:
            out[3] = torch.nan
        return out

    monkeypatch.setattr(PlannedRunnable, "run", run)
    assert main([*ARGS, "--providers", "prefix"]) == 1
    assert "wrong: first run" in capsys.readouterr().out


def over_pages(q, cache, tables, lens, scale):
    """Attention of q [B, H, 24] over pages [pages, page_size, 24], whose first 16 are the value."""
    rows = zip(q.float(), tables, lens.tolist(), strict=True)
    kvs = [(row, cache[table.long()].flatten(0, 1)[:n].float()) for row, table, n in rows]
    outs = [torch.softmax(row @ kv.T * scale, -1) @ kv[:, :16] for row, kv in kvs]
    return torch.stack(outs).to(q.dtype)


def flash_attn_with_kvcache(
    *, q, qv, k_cache, v_cache, page_table, cache_seqlens, cu_seqlens_q, cu_seqlens_k_new,
    max_seqlen_q, softmax_scale, causal, num_splits,
):  # fmt: skip
    assert (cu_seqlens_q.diff() == max_seqlen_q).all() and causal and num_splits == 0
    assert (cu_seqlens_k_new.diff() == cache_seqlens).all()
    whole, cache = torch.cat([qv, q], -1), torch.cat([v_cache, k_cache], -1)
    return over_pages(whole, cache[:, :, 0], page_table, cache_seqlens, softmax_scale)


class BatchMLAPagedAttentionWrapper:
    def __init__(self, workspace, backend):
        assert workspace.nbytes >= 128 << 20 and backend == "auto"

    def plan(
        self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe,
        page_size, causal, sm_scale, q_data_type, kv_data_type,
    ):  # fmt: skip
        assert (num_heads, head_dim_ckv, head_dim_kpe, causal) == (4, 16, 8, False)
        assert q_data_type == kv_data_type == torch.bfloat16
        assert (kv_indptr.diff() == (kv_len_arr + page_size - 1) // page_size).all()
        ends = zip(kv_indptr.tolist(), kv_indptr[1:].tolist(), strict=False)
        self.tables = [kv_indices[begin:end] for begin, end in ends]
        self.lens, self.scale, self.page_size = kv_len_arr, sm_scale, page_size

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, out):
        assert ckv_cache.shape[1] == self.page_size
        q, cache = torch.cat([q_nope, q_pe], -1), torch.cat([ckv_cache, kpe_cache], -1)
        return out.copy_(over_pages(q, cache, self.tables, self.lens, self.scale))


def get_mla_metadata(cache_seqlens, num_q_tokens_per_head_k, num_heads_k):
    assert (num_q_tokens_per_head_k, num_heads_k) == (4, 1)
    return torch.zeros(8), torch.arange(len(cache_seqlens) + 1)


def flash_mla_with_kvcache(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits,
    softmax_scale, causal,
):  # fmt: skip
    assert k_cache.shape[1] == 64 and head_dim_v == 16 and len(num_splits) == len(q) + 1
    out = over_pages(q[:, 0], k_cache[:, :, 0], block_table, cache_seqlens, softmax_scale)
    return out[:, None], None


def stand_in(name, **functions):
    module = ModuleType(name)
    vars(module).update(functions)
    return module


FLASH_MLA = {
    "get_mla_metadata": get_mla_metadata,
    "flash_mla_with_kvcache": flash_mla_with_kvcache,
}


@pytest.fixture
def peers(monkeypatch):
    """SGLang's kernels, with FlashMLA in DeepSeek's own package."""
    modules = {
        "sgl_kernel": stand_in("sgl_kernel"),
        "sgl_kernel.flash_attn": stand_in(
            "sgl_kernel.flash_attn", flash_attn_with_kvcache=flash_attn_with_kvcache
        ),
        "flashinfer": stand_in(
            "flashinfer",
            mla=SimpleNamespace(BatchMLAPagedAttentionWrapper=BatchMLAPagedAttentionWrapper),
        ),
        **dict.fromkeys(latent._FLASH_MLA),  # None: no such module
        "flash_mla": stand_in("flash_mla", **FLASH_MLA),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    for kind in (latent.Provider, latent.FlashAttention3, latent.FlashMla):
        monkeypatch.setattr(kind, "available", lambda self: None)


@pytest.mark.parametrize("place", latent._FLASH_MLA)
def test_flash_mla_is_found_wherever_it_may_be(peers, place, monkeypatch):
    monkeypatch.setitem(sys.modules, place, stand_in(place, **FLASH_MLA))
    assert latent.flash_mla().__name__ == place
    monkeypatch.undo()
    for name in latent._FLASH_MLA:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    names = ", ".join(latent._FLASH_MLA)
    assert f"cannot import any of {names}" in latent.PROVIDERS["flashmla"]().available()


SHARED_PAGES = [*ARGS[:-1], "1,5_128,9"]


@pytest.mark.parametrize("page_size", ["1", "64"])
def test_every_peer_is_judged_and_timed_beside_ours(peers, page_size, tmp_path, capsys):
    out = tmp_path / "out.json"
    assert main([*SHARED_PAGES, "--page-size", page_size, "--json", str(out)]) == 0
    rows = provenance.load(out)["rows"]
    assert [(row["provider"], row["status"]) for row in rows] == [
        (name, "ok") for name in ("prefix", "fa3", "flashinfer:mla", "flashmla")
    ]
    assert all(0 < row["error"] < 5e-3 for row in rows)
    assert rows[-1]["module"] == "flash_mla"
    assert [row["run_page_size"] for row in rows] == [None] * 3 + [64 if page_size == "1" else None]
    ratio = min(row["us"] for row in rows[1:]) / rows[0]["us"]
    (line,) = (x for x in capsys.readouterr().out.splitlines() if x.startswith("| `1,5_128,9`"))
    assert all(f"| {row['us']:.1f} (" in line for row in rows) and line.endswith(f"| {ratio:.2f} |")


@pytest.mark.parametrize("provider", ["fa3", "flashinfer:mla", "flashmla"])
def test_a_peer_that_reads_other_tokens_is_wrong(peers, provider, monkeypatch, tmp_path):
    right = over_pages
    monkeypatch.setitem(
        globals(), "over_pages", lambda q, cache, tables, lens, scale: right(
            q, cache, tables, lens - 1, scale
        ),
    )  # fmt: skip
    out = tmp_path / "out.json"
    assert main([*SHARED_PAGES, "--providers", provider, "--json", str(out)]) == 0
    (row,) = provenance.load(out)["rows"]
    assert row["status"].startswith("wrong: first run") and row["us"] is None


def test_where_a_server_runs_stock_kernels_ours_is_not_timed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(planned, "why_no_backend", lambda *args: "group_size:64")
    assert main([*ARGS, "--providers", "prefix"]) == 0
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last == "- prefix: unsupported: a server runs stock kernels (group_size:64)"


def test_values_are_a_part_of_the_cache():
    case = build_case(Tree.parse("1,5_70,9"), HEADS, 1, torch.bfloat16, torch.device("cpu"))
    assert all(
        v.data_ptr() == k.data_ptr() and v.shape[-1] == 16
        for k, v in zip(case.k, case.v, strict=True)
    )
    assert len({k.data_ptr() for k in case.k}) == case.num_layers >= 2
    assert case.new_out()[0].shape == (5, 4, 16)
    assert kv_bytes(10, HEADS) == 10 * 24 * 2
    assert flops(case.tree, HEADS) == 5 * 79 * 4 * 2 * (24 + 16)


def test_an_unknown_provider_is_refused(capsys):
    with pytest.raises(SystemExit):
        main([*ARGS, "--providers", "fa4"])
    assert "provider 'fa4': known are prefix, fa3" in capsys.readouterr().err
