"""Dumps attention of chosen layers from a running engine: what it was given and what it made of it.

An SGLang plugin of the evaluation, loaded into the engine's processes by eval.engine_process; it
works with any attention backend and plants a fault as well when one is asked for (faults.py).

Captured graphs do not run Python, so q and the output are copied into fixed buffers right behind
the attention of each chosen layer: a copy that is captured with the graph and replayed with it. The
KV is read from the pool after the step, through req_to_token, as SGLang itself finds it.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from eval.compare_outputs import faults

FOLDER_ENV = "EVAL_DUMP_FOLDER"
# A dumped step is preceded by this many with the same requests less one: the newest tokens of a
# prefix step are appended ones then, not part of its plan.
STEP = 5
_CONFIG, _ORDER = "config.json", "order.json"


@dataclass(frozen=True)
class LayerDump:
    """One layer's attention in one decode step, on the CPU.

    q, out    [B, Hq, D] of the model's dtype
    k, v      [slots, Hkv, D], the slots that any of the requests uses
    index     int64 [B, longest], rows of k and v of each request's tokens; row i counts up to
              seq_lens[i]
    seq_lens  int64 [B], the token being decoded included
    sm_scale  factor of the scores
    replayed  whether a captured graph ran the step
    decision  variant and reason of a `prefix` backend's step, None with any other backend
    """

    q: torch.Tensor
    out: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    index: torch.Tensor
    seq_lens: torch.Tensor
    sm_scale: float
    replayed: bool
    decision: list[str] | None


def configure(folder: Path, layers: list[int], max_batch: int) -> dict[str, str]:
    """Make the folder of an engine's dumps; returns the environment that the plugin needs."""
    folder.mkdir(parents=True)
    config = {"layers": layers, "max_batch": max_batch}
    (folder / _CONFIG).write_text(json.dumps(config))
    return {FOLDER_ENV: str(folder)}


def order(folder: Path, name: str, requests: int) -> None:
    """Ask for a dump under `name` when that many requests have run together for STEP steps."""
    (folder / _ORDER).write_text(json.dumps({"name": name, "requests": requests}))


def is_open(folder: Path) -> bool:
    """Tell whether the ordered dump is still to be made."""
    return (folder / _ORDER).exists()


def load(folder: Path, name: str, layer: int) -> LayerDump:
    return LayerDump(**torch.load(_file(folder, name, layer), weights_only=True))


def register() -> None:
    faults.register()
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    recorder = Recorder(Path(os.environ[FOLDER_ENV]))
    for target, hook in (
        ("sglang.srt.layers.radix_attention.RadixAttention.forward", recorder.around_attention),
        ("sglang.srt.model_executor.model_runner.ModelRunner.forward", recorder.around_step),
    ):
        HookRegistry.register(target, hook, HookType.AROUND)


class Recorder:
    """State of the plugin in one engine process."""

    def __init__(self, folder: Path):
        config = json.loads((folder / _CONFIG).read_text())
        self._folder, self._max_batch = folder, config["max_batch"]
        # layer -> (q, out), filled by eager steps and by replayed graphs alike
        self._buffers: dict[int, tuple[torch.Tensor, torch.Tensor] | None] = dict.fromkeys(
            config["layers"]
        )
        self._sm_scale: dict[int, float] = {}
        self._together = 0
        self._python_ran = False

    def around_attention(self, original, layer, q, k, v, forward_batch, *args, **kwargs):
        out = original(layer, q, k, v, forward_batch, *args, **kwargs)
        if layer.layer_id in self._buffers and forward_batch.forward_mode.is_decode():
            self._python_ran = True
            self._copy(layer, q, out)
        return out

    def around_step(self, original, runner, forward_batch, *args, **kwargs):
        batch, self._python_ran = forward_batch.batch_size, False
        result = original(runner, forward_batch, *args, **kwargs)
        if forward_batch.forward_mode.is_decode():
            self._after_decode(runner, forward_batch, batch)
        return result

    def _copy(self, layer, q: torch.Tensor, out: torch.Tensor) -> None:
        rows = min(len(q), self._max_batch)
        shape = (self._max_batch, layer.tp_q_head_num, layer.qk_head_dim)
        if self._buffers[layer.layer_id] is None:
            # Warm-up runs in inference mode, steps need not: a normal tensor is for both.
            with torch.inference_mode(False):
                self._buffers[layer.layer_id] = tuple(
                    torch.empty(shape, dtype=out.dtype, device=out.device) for _ in range(2)
                )
        self._sm_scale[layer.layer_id] = layer.scaling
        for buffer, value in zip(self._buffers[layer.layer_id], (q, out), strict=True):
            buffer[:rows].copy_(value[:rows].reshape(rows, *shape[1:]))

    def _after_decode(self, runner, forward_batch, batch: int) -> None:
        if not is_open(self._folder):
            self._together = 0
            return
        wanted = json.loads((self._folder / _ORDER).read_text())
        self._together = self._together + 1 if batch == wanted["requests"] else 0
        step = prefix_step(runner)
        planned = step is not None and step.new_plan is not None
        if self._together < STEP or planned:
            return
        self._save(wanted["name"], runner, forward_batch, batch, step)
        (self._folder / _ORDER).unlink()

    def _save(self, name: str, runner, forward_batch, batch: int, step) -> None:
        seq_lens = forward_batch.seq_lens[:batch].cpu().long()
        rows = runner.req_to_token_pool.req_to_token[forward_batch.req_pool_indices[:batch]]
        rows = rows[:, : int(seq_lens.max())].cpu().long()
        newest = rows[torch.arange(batch), seq_lens - 1]
        if not torch.equal(newest, forward_batch.out_cache_loc[:batch].cpu().long()):
            raise RuntimeError("the newest slots in req_to_token are not those of this step")
        slots, index = compact(rows, seq_lens)
        for layer, (q, out) in self._buffers.items():
            caches = (
                runner.token_to_kv_pool.get_key_buffer(layer),
                runner.token_to_kv_pool.get_value_buffer(layer),
            )
            k, v = (cache[slots.to(cache.device)].cpu() for cache in caches)
            dump = LayerDump(
                q=q[:batch].cpu().clone(), out=out[:batch].cpu().clone(), k=k, v=v, index=index,
                seq_lens=seq_lens, sm_scale=self._sm_scale[layer], replayed=not self._python_ran,
                decision=None if step is None else [step.decision.variant, step.decision.reason],
            )  # fmt: skip
            torch.save(vars(dump), _file(self._folder, name, layer))


def compact(rows: torch.Tensor, seq_lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the slots in use of rows [B, longest], and rows with each slot's place among them."""
    used = torch.arange(rows.shape[1]) < seq_lens[:, None]
    slots, place = torch.unique(rows[used], return_inverse=True)
    index = torch.zeros_like(rows)
    index[used] = place
    return slots, index


def prefix_step(runner):
    """Return the decode step over a plan that has just run, None for stock attention."""
    from sgl_prefix_attn.engine.runner_backend import find_backend

    backend = find_backend(runner)
    return None if backend is None else backend.decode.active


def _file(folder: Path, name: str, layer: int) -> Path:
    return folder / f"{name}-layer{layer}.pt"
