"""Verify, alone and after the commit of the step before, and decode: programs over (row, group of value heads)."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import values
from pallas_kernels.tpu._launch import (
    FLOAT,
    HIGHEST,
    call,
    fold,
    gate_arrays,
    gate_block,
    heads_of_program,
    in_hbm,
    per_value_head,
    row_block,
    tile_tokens,
    token_tile,
    window_arrays,
    write_states,
)


def decode(q, k, v, raw_gate, raw_beta, A_log, dt_bias, lower_bound, pool, slots, *, interpret=False):
    """Outputs [R,HV,V] and the next pool."""
    window = [x[:, None] for x in (q, k, v, raw_gate, raw_beta)]
    o, _, pool = _launch("decode", window, A_log, dt_bias, lower_bound, pool, slots, jnp.ones_like(slots), interpret)
    return o[:, 0], pool


def verify(
    q, k, v, raw_gate, raw_beta, A_log, dt_bias, lower_bound, pool, slots, lengths, *, interpret=False
):  # fmt: skip
    """Outputs [R,W,HV,V], corrections [R,HV,W,V] fp32, key [R,H,W,K] and gate records [R,HV,W,K]."""
    window = q, k, v, raw_gate, raw_beta
    o, correction = _launch("verify", window, A_log, dt_bias, lower_bound, pool, slots, lengths, interpret)
    return o, correction, *_records(k, raw_gate, slots, lengths)


def verify_after_commit(
    q, k, v, raw_gate, raw_beta, A_log, dt_bias, lower_bound, pool, correction, key, raw_gate_record, commit_length,
    source_slot, final_slot, slots, lengths, *, interpret=False,
):  # fmt: skip
    """What ``verify`` returns, on states into which the records were folded, and the next pool."""
    window = q, k, v, raw_gate, raw_beta
    pending = correction, key, raw_gate_record, commit_length, source_slot, final_slot
    o, correction, pool = _launch(
        "verify_after_commit", window, A_log, dt_bias, lower_bound, pool, slots, lengths, interpret, pending
    )
    return o, correction, *_records(k, raw_gate, slots, lengths), pool


def _records(k, raw_gate, slots, lengths):
    valid = (jnp.arange(k.shape[1])[None] < lengths[:, None]) & (slots > 0)[:, None]
    return [jnp.moveaxis(jnp.where(valid[..., None, None], x, 0), 2, 1) for x in (k, raw_gate)]


def pending_arrays(correction, key, raw_gate, value_heads: int):
    """Records as tiles [.., HV, T, .]; what is not committed is masked in the kernel."""
    key = per_value_head(key, value_heads, key.ndim - 3)
    return [tile_tokens(x, x.ndim - 2).astype(FLOAT) for x in (correction, key, raw_gate)]


def _launch(kernel, window, A_log, dt_bias, lower_bound, pool, slots, lengths, interpret, pending=None):
    R, W, HV, V = window[2].shape
    K, heads, tile = pool.shape[3], heads_of_program(HV), token_tile(W)
    writes = kernel != "verify"
    lengths = jnp.where(slots > 0, lengths, 0)
    commit_length = jnp.zeros_like(slots) if pending is None else pending[3]
    source = slots if pending is None else jnp.where(commit_length > 0, pending[4], slots)
    final = slots if pending is None else jnp.where(commit_length > 0, pending[5], 0)
    scalars = [source, lengths, commit_length, final]
    inputs = [*window_arrays(*window, slots, lengths), *gate_arrays(A_log, dt_bias)]
    specs = [row_block(heads, tile, size) for size in (K, K, V, K, 1)] + [gate_block(heads, K)] * 2
    if pending is not None:
        inputs += pending_arrays(*pending[:3], HV)
        old = inputs[-1].shape[-2]
        specs += [row_block(heads, old, size) for size in (V, K, K)]
    inputs.append(pool)
    specs.append(pl.BlockSpec((None, heads, V, K), lambda r, g, source, *_: (source[r], g, 0, 0)))
    outputs = [jax.ShapeDtypeStruct((R, HV, tile, V), FLOAT)] * 2
    out_specs = [row_block(heads, tile, V)] * 2
    scratch = []
    if writes:
        outputs.append(jax.ShapeDtypeStruct(pool.shape, pool.dtype))
        out_specs.append(in_hbm())
        scratch = [pltpu.VMEM((heads, V, K), pool.dtype), pltpu.SemaphoreType.DMA]
    body = functools.partial(
        _body, heads=heads, window=W, lower_bound=lower_bound, advances=kernel == "decode", folds=pending is not None
    )
    o, correction, *next_pool = call(
        body, name=f"kda_{kernel}", grid=(R, HV // heads), scalars=scalars, inputs=inputs, specs=specs,
        outputs=outputs, out_specs=out_specs, scratch=scratch, interpret=interpret,
        aliases={len(inputs) - 1: 2} if writes else None,
    )  # fmt: skip
    return jnp.moveaxis(o, 1, 2)[:, :W].astype(window[2].dtype), correction[:, :, :W], *next_pool


def _body(source, lengths, commit_length, final, *refs, heads, window, lower_bound, advances, folds):
    r, group = pl.program_id(0), pl.program_id(1)
    q, k, v, raw_gate, raw_beta, rate, bias, *refs = refs
    old = [refs.pop(0) for _ in range(3)] if folds else []
    pool, o, correction, *rest = refs
    next_pool, scratch, semaphore = rest or (None, None, None)
    length, pending = lengths[r], commit_length[r]
    for h in range(heads):
        state = jnp.where(source[r] > 0, pool[h].astype(FLOAT), 0.0)
        if folds:
            state = fold_records(state, *(x[h] for x in old), bias[h], rate[h], lower_bound, pending)
            scratch[h] = state.astype(scratch.dtype)
            state = scratch[h].astype(FLOAT)  # what a separate verify would read
        inputs = values.window_inputs(
            q[h], k[h], raw_gate[h], raw_beta[h], bias[h], rate[h], lower_bound, length, k.shape[-1]
        )
        keys, queries, key_values, query_values = values.window_operands(*inputs, window)
        value = v[h]
        broken = ~values.is_finite(value)
        value = jnp.where(broken, 0.0, value)
        u = jnp.where(broken, jnp.nan, _apply(keys, state, key_values, value))
        correction[h] = u
        o[h] = jnp.where(broken, jnp.nan, _apply(queries, state, query_values, value))
        if advances:
            scratch[h] = fold(state, u, *values.commit_operands(*inputs[1:3], window)).astype(scratch.dtype)
    if next_pool is not None:

        @pl.when(final[r] > 0)
        def _():
            write_states(scratch, semaphore, next_pool.at[final[r], pl.ds(group * heads, heads)])


def _apply(keys, state, mixing, value):
    seen = jax.lax.dot_general(keys, state, (((1,), (1,)), ((), ())), precision=HIGHEST, preferred_element_type=FLOAT)
    return seen + jnp.dot(mixing, value, precision=HIGHEST, preferred_element_type=FLOAT)


def fold_records(state, correction, key, raw_gate, bias, rate, lower_bound, length):
    """The state after ``length`` of the records, tiles of one head; the state itself where ``length`` is 0."""
    inputs = values.commit_inputs(key, raw_gate, bias, rate, lower_bound, length)
    correction = jnp.where(values.token_index(key.shape[0]) < length, correction, 0.0)
    return fold(state, correction, *values.commit_operands(*inputs, window=key.shape[0]))
