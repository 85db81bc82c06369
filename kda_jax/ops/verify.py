"""Speculative verify: outputs and correction records from a checkpoint that is only read."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
from einops import rearrange

from kda_jax.ops._checks import Dims, choose
from kda_jax.ops._couplings import HIGHEST, block_couplings, next_power_of_two
from kda_jax.ops._kernels import check_gate_params, find_kernel, gate_arguments
from kda_jax.ops._slots import read_slots, write_slots
from kda_jax.ops.gate import GateParams, apply_gate, l2_normalize
from kda_jax.ops.recurrent import recurrent_step, repeat_heads
from kda_jax.ops.tree import tree_implementation, window_couplings, window_paths

PAIRWISE_WINDOW = 16  # above, the pairs of a chain are too many exponentials


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Records:
    """What commit needs to rebuild a state: per row and token the correction that was written, and the key and raw gate
    exactly as they came. Zero at and past a row's length. A leading layer axis is allowed throughout."""

    correction: jax.Array  # [R, HV, W, V] fp32
    key: jax.Array  # [R, H, W, K] activation dtype
    raw_gate: jax.Array  # [R, HV, W, K] activation dtype


def check_window_inputs(q, k, v, raw_gate, raw_beta, state_pool) -> Dims:
    """Check the arguments shared by the verify forms; returns the dimensions."""
    dims = Dims()
    dims.check("q", q, "R W H K")
    dims.check("k", k, "R W H K")
    dims.check("v", v, "R W HV V")
    dims.check_groups()
    dims.check("raw_gate", raw_gate, "R W HV K")
    dims.check("raw_beta", raw_beta, "R W HV")
    dims.check("state_pool", state_pool, "N HV V K")
    return dims


def kda_verify(
    q, k, v, raw_gate, raw_beta, gate: GateParams, state_pool, slots, lengths, *, parents=None, implementation=None
):
    """Run a window of up to ``W`` tokens from each request's checkpoint without touching the checkpoint.

    Per token ``u_t = b_t (v_t - S k_t)`` with ``S`` decayed, then ``S + u_t k_t^T`` is read by ``q_t`` (the RecoverSSM
    contract). The XLA form solves the window at once in WY form, so the state enters two small products only. Where a
    token's values are NaN its own outputs and corrections are; other tokens are computed without it.

    Args:
      q, k: [R, W, H, K], v: [R, W, HV, V], raw_gate: [R, W, HV, K], raw_beta: [R, W, HV]: what the layer computed after
        its convolution, before normalisation, gate and sigmoid. Entries at or past a row's length may hold anything.
      gate: ``GateParams``.
      state_pool: [N, HV, V, K], only read.
      slots: int [R]; 0 is the null slot: outputs and records zero, nothing read.
      lengths: int [R], tokens of the row, 0..W.
      parents: int [R, W], the row of the window that each row continues (``ops.tree``), or None: the row before it. A
        tree that is a chain gives the very bits of a window without one, up to a window of 16 (above, chains take
        fewer exponentials and agree to rounding). Commit what stands with ``ops.gather_path``.

    Returns:
      ``o`` [R, W, HV, V] in the dtype of ``v`` (zero at and past the length), and ``Records``.

    Raises:
      ValueError: a shape or dtype that does not fit, naming the argument; ``parents`` for a kernel.
    """
    implementation = tree_implementation("kda_verify", implementation, parents)
    choose("kda_verify", implementation)
    dims = check_window_inputs(q, k, v, raw_gate, raw_beta, state_pool)
    dims.check("slots", slots, "R", kind="int")
    dims.check("lengths", lengths, "R", kind="int")
    if parents is not None:
        dims.check("parents", parents, "R W", kind="int")
    check_gate_params(dims, gate)
    W, HV, K = dims["W"], dims["HV"], dims["K"]
    case = {"K": K, "V": dims["V"], "W": W, "dtype": v.dtype, "state_dtype": state_pool.dtype}
    kernel = find_kernel("kda_verify", implementation, **case)
    if kernel is not None:
        o, *records = kernel(q, k, v, raw_gate, raw_beta, *gate_arguments(gate), state_pool, slots, lengths)
        return o, Records(*records)
    valid = (jnp.arange(W)[None] < lengths[:, None]) & (slots > 0)[:, None]
    state = read_slots(state_pool[None], slots)[0].astype(jnp.float32)

    def mask(x):
        return jnp.where(valid.reshape(valid.shape + (1,) * (x.ndim - 2)), x, 0)

    q, k, raw_gate = mask(q), mask(k), mask(raw_gate)
    values, beta = mask(v.astype(jnp.float32)), mask(jax.nn.sigmoid(raw_beta.astype(jnp.float32)))
    log_decay = mask(apply_gate(raw_gate, gate))

    queries, keys = repeat_heads(l2_normalize(q) * K**-0.5, HV, 2), repeat_heads(l2_normalize(k), HV, 2)
    queries, keys, log_decay, beta, values = (jnp.swapaxes(x, 1, 2) for x in (queries, keys, log_decay, beta, values))
    broken = ~jnp.isfinite(values)
    queries, keys, log_decay, beta, values = (
        jnp.where(jnp.isfinite(x), x, 0) for x in (queries, keys, log_decay, beta, values)
    )
    attention, solve, decay = _couple(queries, keys, log_decay, beta, parents)
    read = jnp.concatenate([keys * decay, queries * decay], axis=2)
    seen, output = jnp.split(jnp.einsum("rhwk,rhvk->rhwv", read, state, precision=HIGHEST), 2, axis=2)
    correction = solve(beta[..., None] * (values - seen))
    output = output + jnp.matmul(attention, correction, precision=HIGHEST)
    output, correction = (jnp.where(broken, jnp.nan, x) for x in (output, correction))
    chex.assert_shape(correction, (dims["R"], HV, W, dims["V"]))
    chex.assert_type(correction, jnp.float32)
    records = Records(
        correction=correction,
        key=rearrange(k, "r w h k -> r h w k"),
        raw_gate=rearrange(raw_gate, "r w h k -> r h w k"),
    )
    return rearrange(output, "r h w v -> r w h v").astype(v.dtype), records


def _couple(q, k, log_decay, beta, parents):
    """Couplings of windows [R, HV, W, K]: attention [.., W, W], a function that applies ``(I + L)^-1``, exp(prefix)."""
    R, _, W, _ = k.shape
    if W <= PAIRWISE_WINDOW or parents is not None:
        attention, lower, decay = window_couplings(q, k, log_decay, beta, window_paths(R, W, parents))
        solve = functools.partial(
            jax.lax.linalg.triangular_solve, lower, left_side=True, lower=True, unit_diagonal=True
        )
        return attention, solve, decay

    def pad(x):
        return jnp.pad(x, [(0, 0), (0, 0), (0, next_power_of_two(W) - W)] + [(0, 0)] * (x.ndim - 3))

    block = block_couplings(pad(q), pad(k), pad(log_decay), pad(beta))
    inverse = block.inverse[..., :W, :W]
    attention, decay = block.attention[..., :W, :W], jnp.exp(block.prefix[..., :W, :])
    return attention, lambda right: jnp.matmul(inverse, right, precision=HIGHEST), decay


def kda_verify_native(
    q,
    k,
    v,
    raw_gate,
    raw_beta,
    gate: GateParams,
    state_pool,
    source_slots,
    target_slots,
    lengths,
    *,
    implementation=None,
):
    """The native form that recovery replaces: every position's state is written to a slot of its own.

    Args:
      q, k, v, raw_gate, raw_beta, gate, lengths: as in ``kda_verify``.
      state_pool: [N, HV, V, K]; donate it to update it in place.
      source_slots: int [R], the slot holding each row's current state (0: null row).
      target_slots: int [R, W], the slot that receives the state after token ``t``; 0 writes nothing. A row may write
        the slot it reads from.

    Returns:
      ``o`` [R, W, HV, V] in the dtype of ``v``, and the next pool.

    Raises:
      ValueError: a shape or dtype that does not fit, naming the argument.
    """
    choose("kda_verify_native", implementation)
    dims = check_window_inputs(q, k, v, raw_gate, raw_beta, state_pool)
    dims.check("source_slots", source_slots, "R", kind="int")
    dims.check("target_slots", target_slots, "R W", kind="int")
    dims.check("lengths", lengths, "R", kind="int")
    W, HV, K = dims["W"], dims["HV"], dims["K"]
    valid = (jnp.arange(W)[None] < lengths[:, None]) & (source_slots > 0)[:, None]

    def tokens_first(x):
        x = jnp.where(valid.reshape(valid.shape + (1,) * (x.ndim - 2)), x, 0)
        return jnp.moveaxis(x, 1, 0)

    def step(state, token):
        state, output, _ = recurrent_step(state, *token)
        return state, (output, state)

    inputs = (
        repeat_heads(l2_normalize(q) * K**-0.5, HV, 2),
        repeat_heads(l2_normalize(k), HV, 2),
        v.astype(jnp.float32),
        apply_gate(raw_gate, gate),
        jax.nn.sigmoid(raw_beta.astype(jnp.float32)),
    )
    state = read_slots(state_pool[None], source_slots)[0].astype(jnp.float32)
    _, (output, states) = jax.lax.scan(step, state, tuple(tokens_first(x) for x in inputs))
    targets = jnp.where(valid, target_slots, 0)
    states = states.reshape(1, -1, *states.shape[2:])
    pool = write_slots(state_pool[None], targets.T.reshape(-1), states)[0]
    return jnp.where(valid[..., None, None], jnp.moveaxis(output, 0, 1), 0).astype(v.dtype), pool
