"""One token a row, on the pool in place: programs over (row, value head, block of value rows), nothing prepared."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import values
from pallas_kernels.triton._launch import BLOCKS, FLOAT, along, block_rows, key_tile, load, named, store, within
from pallas_kernels.triton.preparation import gate_parameters


def decode(q, k, v, raw_gate, raw_beta, A_log, dt_bias, lower_bound, pool, slots, *, interpret=False):
    """Outputs [R,HV,V] and the next pool."""
    R, H, _ = q.shape
    HV, V = v.shape[1:]
    rows = block_rows("decode", V)
    inputs = {"q": q, "k": k, "v": v, "raw_gate": raw_gate, "raw_beta": raw_beta, "A_log": A_log, "dt_bias": dt_bias}
    return named(
        lambda refs: _body(refs, rows=rows, groups=HV // H, lower_bound=lower_bound),
        inputs | {"pool": pool, "slots": slots},
        {"o": jax.ShapeDtypeStruct((R, HV, V), v.dtype), "next_pool": "pool"},
        name="kda_decode",
        grid=(pl.cdiv(V, rows), HV, R),
        warps=BLOCKS["decode"].warps,
        interpret=interpret,
    )


def _body(refs, *, rows, groups, lower_bound):
    start, hv, r = pl.program_id(0) * rows, pl.program_id(1), pl.program_id(2)
    V, K = refs.pool.shape[2:]
    columns = key_tile(K)
    value, channel = along(0, rows, start), along(1, columns)
    tall, wide = within(value, V, rows), within(channel, K, columns)
    slot = refs.slots[r]

    @pl.when(slot > 0)
    def _():
        state = load(refs.pool, (slot, hv, value, channel), tall, wide).astype(FLOAT)
        hk = jax.lax.div(hv, groups)
        queries = values.normalized(load(refs.q, (r, hk, channel), wide), K**-0.5)
        keys = values.normalized(load(refs.k, (r, hk, channel), wide))
        rate, bias = gate_parameters(refs, (hv,))
        decay = values.token_decay(load(refs.raw_gate, (r, hv, channel), wide), bias, rate, lower_bound)
        v = load(refs.v, (r, hv, value), tall).astype(FLOAT)
        beta = values.sigmoid(jnp.full((1, 1), refs.raw_beta[r, hv]).astype(FLOAT))
        state, output = values.decode(state, queries, keys, v, decay, beta)
        store(refs.next_pool, (slot, hv, value, channel), state, tall, wide)
        store(refs.o, (r, hv, value), output, tall)

    @pl.when(slot <= 0)
    def _():
        store(refs.o, (r, hv, value), jnp.zeros((rows, 1), FLOAT), tall)
