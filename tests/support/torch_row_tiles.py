"""A KernelBackend that runs the words of row tiles in torch, for machines without a Hopper GPU."""

from sgl_prefix_attn.engine import build
from sgl_prefix_attn.execute import row_tile_reference as oracle
from sgl_prefix_attn.execute.backends import gluon_backend
from sgl_prefix_attn.execute.backends.gluon_backend import GluonBackend


class TorchRowTiles(GluonBackend):
    """GluonBackend with its kernels replaced by their oracle; of a small GPU, so that few requests
    fill it and few blocks are split."""

    def __init__(self, heads, dtype, device):
        super().__init__(heads, dtype, device)
        self.num_sms = 16

    def fill(self, workspace, plan, req_to_token, req_pool_indices):
        oracle.fill(workspace.words, req_to_token, req_pool_indices, _blocks(workspace))

    def append(self, workspace, seq_lens, out_cache_loc):
        oracle.append(workspace.words, seq_lens, out_cache_loc, _blocks(workspace))

    def forward(self, workspace, layer):
        out, lse = oracle.execute(
            workspace.words, layer.q, layer.k_cache, layer.v_cache, _blocks(workspace),
            sm_scale=layer.sm_scale, logits_soft_cap=layer.soft_cap,
        )  # fmt: skip
        batch = int(workspace.words[oracle.W.H_BATCH])
        layer.out[:batch] = out[:batch]
        if layer.out_lse is not None:
            layer.out_lse[:batch] = lse[:batch]


def say_that_row_tiles_run(put=setattr):
    """Let servers that start on this machine choose row tiles, run in torch; put: setattr, or a
    monkeypatch's."""
    put(build, "why_no_row_tiles", lambda *args: None)
    put(gluon_backend, "GluonBackend", TorchRowTiles)


def _blocks(workspace) -> oracle.Blocks:
    return oracle.Blocks(workspace.kv_indices, workspace.keys)
