"""Verify, alone and after the commit of the step before: programs over (value rows, value head, row)."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import values
from pallas_kernels.triton._launch import (
    FLOAT,
    PRECISION,
    along,
    block_of,
    key_tile,
    load,
    named,
    store,
    token_tile,
    within,
)
from pallas_kernels.triton.commit import commit
from pallas_kernels.triton.preparation import prepare_window


def verify(
    q, k, v, raw_gate, raw_beta, A_log, dt_bias, lower_bound, pool, slots, lengths, *, interpret=False
):  # fmt: skip
    """Outputs [R,W,HV,V], corrections [R,HV,W,V] fp32, key [R,H,W,K] and gate records [R,HV,W,K]."""
    X, C, key, gate = prepare_window(
        q, k, raw_gate, raw_beta, A_log, dt_bias, lower_bound, slots, lengths, interpret=interpret
    )
    R, W, HV, V = v.shape
    rows, warps = block_of("verify", V, X.shape[-1], token_tile(W))
    o, correction = named(
        lambda refs: _body(refs, rows=rows),
        {"v": v, "X": X, "C": C, "pool": pool, "slots": slots, "lengths": lengths},
        {"o": jax.ShapeDtypeStruct(v.shape, v.dtype), "correction": jax.ShapeDtypeStruct((R, HV, W, V), FLOAT)},
        name="kda_verify",
        grid=(pl.cdiv(V, rows), HV, R),
        warps=warps,
        interpret=interpret,
    )
    return o, correction, key, gate


def verify_after_commit(
    q, k, v, raw_gate, raw_beta, A_log, dt_bias, lower_bound, pool, correction, key, raw_gate_record, commit_length,
    source_slot, final_slot, slots, lengths, *, interpret=False,
):  # fmt: skip
    """What ``verify`` returns, on states into which the records were folded, and the next pool.

    Two passes over the states: one kernel that folds, writes and multiplies holds too much for this route's compiler
    and takes longer than both (measured: at best 222 us, against 214 apart).
    """
    plan = commit_length, source_slot, final_slot
    records = [x[None] for x in (correction, key, raw_gate_record)]
    layer = [None if x is None else x[None] for x in (A_log, dt_bias)]
    pool = commit(pool[None], *records, *layer, lower_bound, *plan, interpret=interpret)[0]
    window = q, k, v, raw_gate, raw_beta
    return *verify(*window, A_log, dt_bias, lower_bound, pool, slots, lengths, interpret=interpret), pool


def _body(refs, *, rows):
    start, hv, r = pl.program_id(0) * rows, pl.program_id(1), pl.program_id(2)
    W, V, K = refs.v.shape[1], refs.v.shape[3], refs.pool.shape[3]
    tile, columns = token_tile(W), key_tile(K)
    value, channel = along(0, rows, start), along(1, columns)
    masks = within(value, V, rows), within(channel, K, columns)
    slot = refs.slots[r]
    state = load(refs.pool, (slot, hv, value, channel), slot > 0, *masks).astype(FLOAT)
    length = jnp.where(slot > 0, refs.lengths[r], 0)
    line, across = along(0, 2 * tile), along(1, rows, start)
    token = line.map(lambda i: jnp.where(i >= tile, i - tile, i))  # the rows of u, then those of o
    here = within(across, V, rows)
    v = load(refs.v, (r, token, hv, across), token < length, here).astype(FLOAT)
    broken = ~values.is_finite(v)
    X = load(refs.X, (r, hv, line, channel))
    C = load(refs.C, (r, hv, line, along(1, 2 * tile)))
    out = jax.lax.dot_general(X, state, (((1,), (1,)), ((), ())), precision=PRECISION, preferred_element_type=FLOAT)
    out = out + jnp.dot(C, jnp.where(broken, 0.0, v), precision=PRECISION, preferred_element_type=FLOAT)
    out = jnp.where(broken, jnp.nan, out)
    # lines of the other kind point past the end, so that no two lines have the same place
    of_u = line.map(lambda i: jnp.where(i < W, i, W))
    of_o = line.map(lambda i: jnp.where((i >= tile) & (i < tile + W), i - tile, W))
    store(refs.correction, (r, hv, of_u, across), out, of_u < W, here)
    store(refs.o, (r, of_o, hv, across), out, of_o < W, here)
