"""Verify, alone and with the commit of the step before folded in: programs over (row, value head, value rows)."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import values
from pallas_kernels.triton._launch import (
    BLOCKS,
    FLOAT,
    PRECISION,
    along,
    block_rows,
    key_tile,
    load,
    named,
    store,
    token_tile,
    within,
)
from pallas_kernels.triton.commit import fold_records
from pallas_kernels.triton.preparation import prepare_window


def verify(
    q, k, v, raw_gate, raw_beta, A_log, dt_bias, lower_bound, pool, slots, lengths, *, interpret=False
):  # fmt: skip
    """Outputs [R,W,HV,V], corrections [R,HV,W,V] fp32, key [R,H,W,K] and gate records [R,HV,W,K]."""
    X, C, key, gate = prepare_window(
        q, k, raw_gate, raw_beta, A_log, dt_bias, lower_bound, slots, lengths, interpret=interpret
    )
    inputs = {"v": v, "X": X, "C": C, "pool": pool, "slots": slots, "lengths": lengths}
    o, correction = _launch("verify", inputs, v, {}, interpret)
    return o, correction, key, gate


def verify_after_commit(
    q, k, v, raw_gate, raw_beta, A_log, dt_bias, lower_bound, pool, correction, key, raw_gate_record, commit_length,
    source_slot, final_slot, slots, lengths, *, interpret=False,
):  # fmt: skip
    """What ``verify`` returns, on states into which the records were folded, and the next pool."""
    pending = key, raw_gate_record, commit_length
    X, C, key, gate, folded = prepare_window(
        q, k, raw_gate, raw_beta, A_log, dt_bias, lower_bound, slots, lengths, pending, interpret=interpret
    )
    inputs = {"v": v, "X": X, "C": C, "pool": pool, "slots": slots, "lengths": lengths}
    inputs |= {"old_correction": correction, "folded": folded, "commit_length": commit_length}
    inputs |= {"source_slot": source_slot, "final_slot": final_slot}
    o, correction, pool = _launch("verify_after_commit", inputs, v, {"next_pool": "pool"}, interpret)
    return o, correction, key, gate, pool


def _launch(kernel, inputs, v, more, interpret):
    R, W, HV, V = v.shape
    rows = block_rows(kernel, V)
    outputs = {
        "o": jax.ShapeDtypeStruct((R, W, HV, V), v.dtype),
        "correction": jax.ShapeDtypeStruct((R, HV, W, V), FLOAT),
    }
    return named(
        lambda refs: _body(refs, rows=rows),
        inputs,
        outputs | more,
        name=f"kda_{kernel}",
        grid=(pl.cdiv(V, rows), HV, R),
        warps=BLOCKS[kernel].warps,
        interpret=interpret,
    )


def _body(refs, *, rows):
    start, hv, r = pl.program_id(0) * rows, pl.program_id(1), pl.program_id(2)
    W, V, K = refs.v.shape[1], refs.v.shape[3], refs.pool.shape[3]
    tile, columns = token_tile(W), key_tile(K)
    value, channel = along(0, rows, start), along(1, columns)
    masks = within(value, V, rows), within(channel, K, columns)
    slot = refs.slots[r]
    if hasattr(refs, "next_pool"):
        n = refs.commit_length[r]
        pending = n > 0
        source = jnp.where(pending, refs.source_slot[r], slot)
        state = load(refs.pool, (source, hv, value, channel), source > 0, *masks).astype(FLOAT)
        state = fold_records(state, refs.old_correction, (r, hv), refs.folded, (r, hv), n, start, rows)
        final = refs.final_slot[r]
        kept = state.astype(refs.next_pool.dtype)
        store(refs.next_pool, (final, hv, value, channel), kept, pending & (final > 0), *masks)
        state = kept.astype(FLOAT)  # what a separate verify would read
    else:
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
