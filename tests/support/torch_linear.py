"""Linear attention in torch, for the CPU engine: SGLang has only kernels for it that need a GPU.

Convolutions and gated delta rules, with the states that SGLang keeps of each request. Both backends
of a comparison run these, so they need not be SGLang's to the last bit.
"""

import importlib
import os

import torch
import torch.nn.functional as F

CHUNK = 64  # tokens between two states that a prefill can leave in the tree


def install() -> None:
    """Put these in the place of SGLang's kernels, in this process and those that are forked."""
    from sglang.kernels.ops.attention.fla.fused_norm_gate import FusedRMSNormGated
    from sglang.srt.layers.attention.linear import gdn_backend
    from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel
    from sglang.srt.models import lfm2, qwen2_moe
    from sglang.srt.platforms.cpu import CpuSRTPlatform
    from sglang.srt.server_args import ServerArgs

    from tests.support.lora import unpin

    for module in (gdn_backend, lfm2):
        module.causal_conv1d_fn, module.causal_conv1d_update = convolve, convolve_step
    gdn_backend.fused_gdn_gating = lambda *args: tuple(x[None] for x in gates(*args))
    TritonGDNKernel.extend, TritonGDNKernel.packed_decode = extend, decode
    FusedRMSNormGated.forward = gated_norm
    qwen2_moe.fused_gate_sigmoid_mul_add = add_gated
    states = importlib.import_module("sglang.srt.layers.attention.hybrid_linear_attn_backend")
    states.track_mamba_states_all_layers = track_all_layers
    states.track_mamba_states_if_needed = track
    # SGLang keeps states of prefills for the tree on platforms that can do it, and the inputs of
    # convolutions in half precision unless told otherwise.
    CpuSRTPlatform.support_mamba_cache_extra_buffer = lambda self: True
    if hasattr(ServerArgs, "_validate_mamba_extra_buffer"):  # until 0.5.18 it asks no platform
        ServerArgs._validate_mamba_extra_buffer = lambda *_: None
    unpin()
    os.environ["SGLANG_MAMBA_CONV_DTYPE"] = "float32"


def convolve(
    x,
    weight,
    bias=None,
    *,
    conv_states,
    query_start_loc,
    cache_indices,
    has_initial_state,
    activation,
    **_,
):
    """Convolve sequences side by side, x [D, tokens]; conv_states [slots, D, >= K - 1]."""
    width, out = weight.shape[-1] - 1, torch.empty_like(x)
    for i, slot, start, stop in _sequences(query_start_loc, cache_indices):
        state = conv_states[slot, :, -width:]
        before = state if has_initial_state[i] else torch.zeros_like(state)
        seen = torch.cat([before, x[:, start:stop]], 1)
        y = F.conv1d(seen[None], weight[:, None], bias, groups=len(x))[0]
        out[:, start:stop] = F.silu(y) if activation else y
        state.copy_(seen[:, -width:])
    return out


def convolve_step(x, conv_states, weight, bias=None, activation=None, *, conv_state_indices):
    """Convolve one more token of each sequence, x [B, D]."""
    seen = torch.cat([conv_states[conv_state_indices], x[:, :, None]], 2)
    y = (seen[:, :, -weight.shape[-1] :] * weight).sum(-1)
    y = y if bias is None else y + bias
    conv_states[conv_state_indices] = seen[:, :, 1:]
    return F.silu(y) if activation else y


def gates(a_log, a, b, dt_bias):
    """Decay, as a logarithm, and rate of the delta rule: of a and b [tokens, HV], the same."""
    return -a_log.exp() * F.softplus(a + dt_bias), torch.sigmoid(b)


def extend(self, q, k, v, g, beta, *, ssm_states, cache_indices, query_start_loc, **_):
    """Run the rule over sequences side by side: q, k [1, tokens, H, K], v [1, tokens, HV, V].
    Returns outputs like v, None, and the states before each CHUNK tokens of each sequence."""
    (q, k), (v, g, beta) = _for_heads(q[0], k[0], v.shape[2]), (x[0] for x in (v, g, beta))
    out, before = torch.empty_like(v), []
    for _, slot, start, stop in _sequences(query_start_loc, cache_indices):
        state = ssm_states[slot]
        for t in range(start, stop):
            if (t - start) % CHUNK == 0:
                before.append(state.clone())
            out[t] = _step(state[None], *(x[t : t + 1] for x in (q, k, v, g, beta)))[0]
    return out[None], None, torch.stack(before)[None]


def decode(self, mixed_qkv, a, b, *, A_log, dt_bias, ssm_states, cache_indices, **_):  # noqa: N803
    """Run the rule over one more token of each sequence: mixed_qkv [B, 2 * H * K + HV * V]."""
    num_v, v_dim, k_dim = ssm_states.shape[1:]
    rest = mixed_qkv.shape[1] - num_v * v_dim
    q, k, v = mixed_qkv.split([rest // 2, rest // 2, num_v * v_dim], 1)
    q, k = _for_heads(*(x.view(len(x), -1, k_dim) for x in (q, k)), num_v)
    states = ssm_states[cache_indices]
    out = _step(states, q, k, v.view(-1, num_v, v_dim), *gates(A_log, a, b, dt_bias))
    ssm_states[cache_indices] = states
    return out[None]


def gated_norm(self, x, g, *_, **__):
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
    return x * scale * self.weight * F.silu(g)


def add_gated(hidden, weight, shared, out):
    """Add the shared expert's output to that of the others."""
    out += torch.sigmoid(hidden @ weight.flatten())[:, None] * shared


def track(conv_states, ssm_states, sources, mask, targets, batch_size, **_):
    """Keep the states [slots, ...] of the requests in `mask` for the tree."""
    for states in (conv_states, ssm_states):
        states[targets[:batch_size][mask]] = states[sources[:batch_size][mask]]


def track_all_layers(conv_states, ssm_states, *args, **_):
    for layer in zip(conv_states, ssm_states, strict=True):
        track(*layer, *args)


def _sequences(starts, slots):
    """Of each sequence of a prefill: number, slot of its states, first token, last token + 1."""
    starts, slots = starts.tolist(), slots.tolist()
    return [(i, slot, *starts[i : i + 2]) for i, slot in enumerate(slots)]


def _for_heads(q, k, heads: int):
    """Queries, scaled, and keys [tokens, H, K] of unit length, for each of the value's heads."""
    q, k = (F.normalize(x, dim=-1).repeat_interleave(heads // x.shape[1], 1) for x in (q, k))
    return q * q.shape[-1] ** -0.5, k


def _step(states, q, k, v, g, beta):
    """One token of each sequence: q, k [B, HV, K], v [B, HV, V], g, beta [B, HV]. Changes the
    states [B, HV, V, K] in place."""
    states *= g.exp()[..., None, None]
    change = (v - torch.einsum("bhvk,bhk->bhv", states, k)) * beta[..., None]
    states += change[..., None] * k[..., None, :]
    return torch.einsum("bhvk,bhk->bhv", states, q)
