"""eval.compare_outputs layers without an engine: judgement, what is dumped and when."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from eval.compare_outputs import __main__ as command
from eval.compare_outputs import dump, layers
from sgl_prefix_attn import reference
from sgl_prefix_attn.records import HeadConfig
from tests.cpu.forests import path_table
from tests.cpu.problems import make_problem

HEADS = HeadConfig(8, 2, 64)
SHARED = 96


def dump_of(dtype=torch.bfloat16, out_rows=None):
    """Four requests on one node, with tails of different lengths; `out_rows` changes the slots that
    the output is computed from, row by row."""
    paths = path_table([(-1, SHARED)], [0] * 4, [40, 40, 33, 9])
    problem = make_problem(paths, HEADS, dtype)
    rows = problem.req_to_token[problem.pool].long()
    seq_lens = problem.seq_lens.long()
    used = rows if out_rows is None else out_rows(rows.clone(), seq_lens)
    out, _ = reference.full_attention(
        problem.q,
        problem.k,
        problem.v,
        used,
        torch.arange(4),
        seq_lens,
        sm_scale=problem.sm_scale,
        dtype=torch.float32,
    )
    slots, index = dump.compact(rows[:, : int(seq_lens.max())], seq_lens)
    return dump.LayerDump(
        q=problem.q,
        out=out.to(dtype),
        k=problem.k[slots],
        v=problem.v[slots],
        index=index,
        seq_lens=seq_lens,
        sm_scale=problem.sm_scale,
        replayed=False,
        decision=["prefix", "default"],
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_right_attention_passes(dtype):
    error, error_torch, problem = layers.judge(dump_of(dtype))
    assert problem is None
    assert 0 < error.norm <= error.worst_row and 0 < error_torch.norm <= error_torch.worst_row


def test_the_truth_is_full_attention():
    layer = dump_of(torch.float32)
    truth, _ = reference.full_attention(
        layer.q,
        layer.k,
        layer.v,
        layer.index,
        torch.arange(4),
        layer.seq_lens,
        sm_scale=layer.sm_scale,
    )
    error, _, _ = layers.judge(replace(layer, out=truth))
    assert error.worst_row < 1e-14


def not_appended(rows, seq_lens):
    """The newest slot of one request was never written: it reads another of its tokens."""
    rows[3, seq_lens[3] - 1] = rows[3, 0]
    return rows


def tails_swapped(rows, _):
    rows[[0, 1], SHARED:] = rows[[1, 0], SHARED:]
    return rows


def half_a_node_twice(rows, _):
    rows[:, : SHARED // 2] = rows[:, SHARED // 2 : SHARED]
    return rows


@pytest.mark.parametrize("fault", [not_appended, tails_swapped, half_a_node_twice])
def test_wrong_slots_are_wrong(fault):
    _, _, problem = layers.judge(dump_of(out_rows=fault))
    assert problem is not None and "low-precision torch" in problem


def test_one_row_of_nan_is_wrong():
    layer = dump_of()
    layer.out[2, 5, 0] = math.nan
    assert layers.judge(layer)[2] is not None


def test_another_shape_is_refused():
    layer = dump_of()
    with pytest.raises(ValueError, match="output is"):
        layers.judge(replace(layer, out=layer.out[:3]))


def test_compact_index_finds_the_same_slots():
    rows = torch.tensor([[7, 9, 4, 99], [7, 9, 99, 99]])
    slots, index = dump.compact(rows, torch.tensor([3, 2]))
    assert slots.tolist() == [4, 7, 9]
    assert slots[index[0, :3]].tolist() == [7, 9, 4] and slots[index[1, :2]].tolist() == [7, 9]


@pytest.mark.parametrize(
    ("backend", "graphs", "change", "says"),
    [
        ("prefix", False, {}, None),
        ("prefix", True, {"replayed": True}, None),
        ("prefix", True, {}, "eagerly"),
        ("flashinfer", True, {"decision": None}, "eagerly"),
        ("flashinfer", False, {"decision": None}, None),
        ("fa3/prefix", False, {"decision": None}, "without the prefix kernels"),
        ("prefix", False, {"decision": ["stock", "planner_error"]}, "planner_error"),
    ],
)
def test_only_the_step_meant_is_judged(backend, graphs, change, says):
    problem = layers.not_the_step(replace(dump_of(), **change), backend, graphs)
    assert problem is None if says is None else says in problem


def test_first_middle_and_last_layer():
    assert layers.three_layers(4) == [0, 2, 3]
    assert layers.three_layers(3) == [0, 1, 2]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--layers", "2"], "three layers"),
        (["--backends", "flashinfer", "--fault", "drop_node"], "none of the backends is prefix"),
        (["--scenarios", "nope"], "nope"),
    ],
)
def test_bad_arguments_end_with_usage(argv, says, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(["layers", *argv])
    assert stop.value.code == 2 and says in capsys.readouterr().err


BATCH, LAYER = 3, 1


class Server:
    """A runner that decodes a batch of three, each step one token longer, through the recorder."""

    def __init__(self, folder, monkeypatch):
        self.folder = folder / "dumps"
        env = dump.configure(self.folder, [LAYER], max_batch=4)
        self.recorder = dump.Recorder(self.folder)
        assert env == {dump.FOLDER_ENV: str(self.folder)}
        generator = torch.Generator().manual_seed(0)
        self.k, self.v = (torch.randn(90, 2, 8, generator=generator) for _ in range(2))
        self.req_to_token_pool = SimpleNamespace(
            req_to_token=torch.randperm(90, generator=generator).int().view(3, 30)
        )
        self.token_to_kv_pool = SimpleNamespace(
            get_key_buffer=lambda layer: self.k, get_value_buffer=lambda layer: self.v
        )
        self.length, self.planned, self.replays = 10, False, False
        monkeypatch.setattr(dump, "_prefix_step", lambda runner: self._step())

    def _step(self):
        decision = SimpleNamespace(variant="prefix", reason="default")
        return SimpleNamespace(new_plan="plan" if self.planned else None, decision=decision)

    def decode(self, batch=BATCH, lost_slot=False):
        self.length += 1
        lens = torch.arange(self.length, self.length + batch)
        table = self.req_to_token_pool.req_to_token
        slots = table[torch.arange(batch), lens - 1]
        forward_batch = SimpleNamespace(
            batch_size=batch,
            forward_mode=SimpleNamespace(is_decode=lambda: True),
            seq_lens=lens,
            req_pool_indices=torch.arange(batch),
            out_cache_loc=slots + 1 if lost_slot else slots,
        )
        self.q = torch.randn(batch, 4 * 8)
        return self.recorder.around_step(self._forward, self, forward_batch)

    def _forward(self, runner, forward_batch):
        """Layers 0 and 1; a replayed graph copies into the buffers without running Python."""
        for layer_id in (0, LAYER):
            layer = SimpleNamespace(
                layer_id=layer_id, tp_q_head_num=4, qk_head_dim=8, scaling=0.25 + layer_id
            )
            if self.replays:
                if layer_id == LAYER:
                    self.recorder._copy(layer, self.q, 2 * self.q)
            else:
                self.recorder.around_attention(
                    lambda *_: 2 * self.q, layer, self.q, None, None, forward_batch
                )
        return "logits"


@pytest.fixture
def server(tmp_path, monkeypatch):
    return Server(tmp_path, monkeypatch)


@pytest.mark.parametrize("replays", [False, True])
def test_the_fifth_step_together_is_dumped(server, replays):
    server.decode()
    dump.order(server.folder, "some", BATCH)
    server.decode(batch=2)
    for _ in range(dump.STEP - 1):
        assert server.decode() == "logits"
    server.replays = replays
    assert dump.is_open(server.folder)
    server.decode()
    assert not dump.is_open(server.folder)
    layer = dump.load(server.folder, "some", LAYER)
    assert layer.q.shape == (BATCH, 4, 8) and torch.equal(layer.out, 2 * layer.q)
    assert torch.equal(layer.q.flatten(1), server.q)
    assert layer.seq_lens.tolist() == [server.length + i for i in range(BATCH)]
    assert (layer.sm_scale, layer.replayed) == (1.25, replays)
    assert layer.decision == ["prefix", "default"]
    for i, length in enumerate(layer.seq_lens.tolist()):
        slots = server.req_to_token_pool.req_to_token[i, :length].long()
        assert torch.equal(layer.k[layer.index[i, :length]], server.k[slots])
        assert torch.equal(layer.v[layer.index[i, :length]], server.v[slots])


def test_a_planned_step_and_an_interrupted_run_are_waited_out(server):
    dump.order(server.folder, "some", BATCH)
    for batch in (3, 3, 3, 3, 2, 3, 3, 3, 3):
        server.decode(batch)
    server.planned = True
    server.decode()
    assert dump.is_open(server.folder), "a plan of this very step holds its newest tokens"
    server.planned = False
    server.decode()
    assert not dump.is_open(server.folder)


def test_slots_that_are_not_of_this_step_are_no_truth(server):
    dump.order(server.folder, "some", BATCH)
    for _ in range(dump.STEP - 1):
        server.decode()
    with pytest.raises(RuntimeError, match="newest slots"):
        server.decode(lost_slot=True)
