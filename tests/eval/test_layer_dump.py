"""The plugin that dumps attention layers, in a runner of its own: what is dumped, and when."""

from types import SimpleNamespace

import pytest
import torch

from eval.compare_outputs import dump

BATCH, LAYER = 3, 1


def test_compact_index_finds_the_same_slots():
    rows = torch.tensor([[7, 9, 4, 99], [7, 9, 99, 99]])
    slots, index = dump.compact(rows, torch.tensor([3, 2]))
    assert slots.tolist() == [4, 7, 9]
    assert slots[index[0, :3]].tolist() == [7, 9, 4] and slots[index[1, :2]].tolist() == [7, 9]


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
        monkeypatch.setattr(dump, "prefix_step", lambda runner: self._step())

    def _step(self):
        decision = SimpleNamespace(variant="prefix", reason="default")
        return SimpleNamespace(new_plan="plan" if self.planned else None, decision=decision)

    def decode(self, batch=BATCH, lost_slot=False):
        self.length += 1
        lens = torch.arange(self.length, self.length + batch)
        table = self.req_to_token_pool.req_to_token
        slots = table[torch.arange(batch), lens - 1]
        forward_batch = SimpleNamespace(
            batch_size=batch, forward_mode=SimpleNamespace(is_decode=lambda: True), seq_lens=lens,
            req_pool_indices=torch.arange(batch), out_cache_loc=slots + lost_slot,
        )  # fmt: skip
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
