"""Commit: accepted records folded into the states of all layers in one launch, on the pool in place."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.triton._launch import BLOCKS, FLOAT, along, block_rows, key_tile, load, named, store, within
from pallas_kernels.triton.preparation import prepare_commit


def commit(
    pool, correction, key, raw_gate, A_log, dt_bias, lower_bound, commit_length, source_slot, final_slot,
    boundary_slot=None, boundary_length=None, *, interpret=False,
):  # fmt: skip
    """The next pool [L,N,HV,V,K]. Rows must not share slots: a row's states are written as soon as it is done."""
    L, R, HV, _, V = correction.shape
    bounded = boundary_slot is not None
    lengths = [commit_length, boundary_length] if bounded else [commit_length]
    folded = prepare_commit(key, raw_gate, A_log, dt_bias, lower_bound, lengths, interpret=interpret)
    rows = block_rows("commit", V)
    inputs = {"pool": pool, "correction": correction, "folded": folded, "commit_length": commit_length}
    inputs |= {"source_slot": source_slot, "final_slot": final_slot}
    inputs |= {"boundary_slot": boundary_slot, "boundary_length": boundary_length}
    (pool,) = named(
        lambda refs: _body(refs, rows=rows, R=R),
        inputs,
        {"next_pool": "pool"},
        name="kda_commit",
        grid=(pl.cdiv(V, rows), HV, L * R),
        warps=BLOCKS["commit"].warps,
        interpret=interpret,
    )
    return pool


def fold_records(state, correction, at, folded, folded_at, length, start, rows):
    """``state * total + sum over t < length of u_t keys_t^T``, in fp32; all of it the state where ``length`` is 0."""
    W, V = correction.shape[-2:]
    value, channel = along(0, rows, start), along(1, folded.shape[-1])
    total = load(folded, (*folded_at, W, channel), length > 0)
    state = state * jnp.where(length > 0, total, 1.0)
    for t in range(W):
        put = load(correction, (*at, t, value), t < length, within(value, V, rows))
        state = state + put * load(folded, (*folded_at, t, channel), t < length)
    return state


def _body(refs, *, rows, R):
    start, hv = pl.program_id(0) * rows, pl.program_id(1)
    layer, r = jax.lax.div(pl.program_id(2), R), jax.lax.rem(pl.program_id(2), R)
    V, K = refs.pool.shape[3:]
    columns = key_tile(K)
    value, channel = along(0, rows, start), along(1, columns)
    masks = within(value, V, rows), within(channel, K, columns)
    n, source = refs.commit_length[r], refs.source_slot[r]

    @pl.when((n > 0) & (source > 0))
    def _():
        state = load(refs.pool, (layer, source, hv, value, channel), *masks).astype(FLOAT)
        targets = [(refs.final_slot[r], n)]
        if hasattr(refs, "boundary_slot"):
            targets.append((refs.boundary_slot[r], refs.boundary_length[r]))
        for target, (slot, length) in enumerate(targets):
            at = layer, r, hv
            new = fold_records(state, refs.correction, at, refs.folded, (target, *at), length, start, rows)
            store(refs.next_pool, (layer, slot, hv, value, channel), new, slot > 0, *masks)
