"""The Kimi Delta Attention block around the operations: projections, convolution, gates, norm.

The forms of one layer. Inputs are already normed; activations [B, T, D] in the model dtype; states fp32.
"""

import jax
import jax.numpy as jnp
from einops import rearrange

from kda_jax import ops
from kda_jax.config import ModelConfig
from kda_jax.layers.linear import gated_rms_norm, linear
from kda_jax.layers.packing import pack, spread
from kda_jax.layers.params import KDAParams


def gate_params(params: KDAParams, config: ModelConfig) -> ops.GateParams:
    """The layer's ``GateParams``."""
    return ops.GateParams(params.A_log, params.dt_bias, config.gate_lower_bound)


def _conv_inputs(params: KDAParams, x):
    """Inputs of the short convolution, q, k and v channels side by side: [B, T, D] -> [B, T, 2*H*K + HV*V]."""
    return jnp.concatenate([linear(x, w) for w in (params.q_proj, params.k_proj, params.v_proj)], axis=-1)


def _split_heads(y, config: ModelConfig):
    """Convolution output [..., C] -> q, k [..., H, K], v [..., HV, V]."""
    width = config.kda_num_heads * config.kda_key_dim
    q, k, v = jnp.split(y, [width, 2 * width], axis=-1)
    heads = {"h": config.kda_num_heads}
    return (
        rearrange(q, "... (h k) -> ... h k", **heads),
        rearrange(k, "... (h k) -> ... h k", **heads),
        rearrange(v, "... (h v) -> ... h v", h=config.kda_num_value_heads),
    )


def _raw_gates(params: KDAParams, x, config: ModelConfig):
    """Projections before gate and sigmoid: raw_gate [..., HV, K], raw_beta [..., HV]."""
    raw_gate = linear(linear(x, params.f_a_proj), params.f_b_proj)
    return rearrange(raw_gate, "... (h k) -> ... h k", h=config.kda_num_value_heads), linear(x, params.b_proj)


def _output(params: KDAParams, x, o, config: ModelConfig):
    """Gated norm per head and output projection: [..., D], [..., HV, V] -> [..., D]."""
    z = linear(linear(x, params.g_a_proj), params.g_b_proj)
    z = rearrange(z, "... (h v) -> ... h v", h=config.kda_num_value_heads)
    y = gated_rms_norm(o, params.o_norm, z, config.rms_norm_eps)
    return linear(rearrange(y, "... h v -> ... (h v)"), params.o_proj)


def prefill(params: KDAParams, x, lengths, config: ModelConfig, *, state=None, history=None, implementation=None):
    """Sequences ``x`` [B, T, D] of ``lengths`` [B] (or None: all of T), from ``state`` [B, HV, V, K] and ``history``
    [B, Wc-1, C], or fresh.

    Returns the output [B, T, D], the states [B, HV, V, K] and convolution histories [B, Wc-1, C] after the last tokens.
    """
    inputs = _conv_inputs(params, x)
    y, history = ops.conv_prefill(inputs, params.conv, history=history, lengths=lengths, implementation=implementation)
    q, k, v = _split_heads(y, config)
    raw_gate, raw_beta = _raw_gates(params, x, config)
    gate = gate_params(params, config)
    o, state = ops.kda_chunked(
        ops.l2_normalize(q),
        ops.l2_normalize(k),
        v,
        ops.kda_gate(raw_gate, gate.A_log, gate.dt_bias, lower_bound=gate.lower_bound),
        jax.nn.sigmoid(raw_beta.astype(jnp.float32)),
        initial_state=state,
        lengths=lengths,
        bounded=config.gate_lower_bound is not None,
        implementation=implementation,
    )
    return _output(params, x, o, config), state, history


def _window(
    params: KDAParams, x, history_pool, slots, lengths, config: ModelConfig, implementation, parents=None, packing=None
):
    """What windows ``x`` [R, W, D] bring to the state: (q, k, v, raw_gate, raw_beta), and the convolution inputs."""
    inputs = spread(packing, _conv_inputs(params, x))
    y = ops.conv_step(inputs, params.conv, history_pool, slots, lengths, parents=parents, implementation=implementation)
    return (*_split_heads(y, config), *_spread_gates(params, x, config, packing)), inputs


def _spread_gates(params: KDAParams, x, config: ModelConfig, packing):
    return tuple(spread(packing, raw) for raw in _raw_gates(params, x, config))


def decode(params: KDAParams, x, state_pool, history_pool, slots, config: ModelConfig, *, implementation=None):
    """One token a request: ``x`` [R, 1, D].

    Returns the output [R, 1, D], the next state pool, and the convolution inputs [R, 1, C] for ``ops.conv_commit``.
    """
    window, inputs = _window(params, x, history_pool, slots, jnp.ones_like(slots), config, implementation)
    token = (part[:, 0] for part in window)
    gate = gate_params(params, config)
    o, state_pool = ops.kda_decode(*token, gate, state_pool, slots, implementation=implementation)
    return _output(params, x, o[:, None], config), state_pool, inputs


def verify(
    params: KDAParams,
    x,
    state_pool,
    history_pool,
    slots,
    lengths,
    config: ModelConfig,
    *,
    parents=None,
    packing=None,
    implementation=None,
):
    """A window a request, ``x`` [R, W, D], a tree with ``parents`` [R, W]; both pools are only read. With a ``Packing``
    of the windows ``x`` and the output are packed, [1, N, D].

    Returns the output [R, W, D], ``ops.Records``, and the convolution inputs [R, W, C] for ``ops.conv_commit``.
    """
    window, inputs = _window(params, x, history_pool, slots, lengths, config, implementation, parents, packing)
    gate = gate_params(params, config)
    how = {"parents": parents, "implementation": implementation}
    o, records = ops.kda_verify(*window, gate, state_pool, slots, lengths, **how)
    return _output(params, x, pack(packing, o), config), records, inputs


def verify_after_commit(
    params: KDAParams,
    x,
    state_pool,
    history_pool,
    slots,
    lengths,
    pending: ops.Records,
    pending_inputs,
    plan: ops.CommitPlan,
    config: ModelConfig,
    *,
    parents=None,
    packing=None,
    implementation=None,
):
    """``verify`` of rows whose last commit (``pending``, its convolution inputs and ``plan``) is still to be written.

    Returns what ``verify`` does, then the next state pool and the next history pool.
    """
    gate, how = gate_params(params, config), {"implementation": implementation}
    if parents is not None:  # trees are committed and verified apart
        history_pool = ops.conv_commit(history_pool, pending_inputs, plan, **how)
        state_pool = ops.kda_commit(state_pool, pending, gate, plan, **how)
        rows = state_pool, history_pool, slots, lengths, config
        return *verify(params, x, *rows, parents=parents, packing=packing, **how), state_pool, history_pool
    inputs = spread(packing, _conv_inputs(params, x))
    y, history_pool = ops.conv_step_after_commit(
        inputs, params.conv, history_pool, slots, lengths, pending_inputs, plan, **how
    )
    window = *_split_heads(y, config), *_spread_gates(params, x, config, packing)
    o, records, state_pool = ops.kda_verify_after_commit(
        *window, gate, state_pool, slots, lengths, pending, plan, **how
    )
    return _output(params, x, pack(packing, o), config), records, inputs, state_pool, history_pool


def verify_native(
    params: KDAParams,
    x,
    state_pool,
    history_pool,
    source_slots,
    target_slots,
    lengths,
    config: ModelConfig,
    *,
    packing=None,
    implementation=None,
):
    """As ``verify``, but every position's state is written to a slot of its own (``ops.kda_verify_native``).

    Returns the output [R, W, D], the next state pool, and the convolution inputs [R, W, C].
    """
    window, inputs = _window(params, x, history_pool, source_slots, lengths, config, implementation, packing=packing)
    slots = (source_slots, target_slots)
    gate = gate_params(params, config)
    o, state_pool = ops.kda_verify_native(*window, gate, state_pool, *slots, lengths, implementation=implementation)
    return _output(params, x, pack(packing, o), config), state_pool, inputs
