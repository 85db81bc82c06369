"""One token a row, on the pool in place: one program a (row, value head, 64 value rows), plain fp32."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic._tile import FLOAT, LAYOUT, ROWS, interpret_params, smem, store
from pallas_kernels.values import sigmoid, token_decay

COLUMNS, VALUES = LAYOUT.WGMMA.reduce(0), LAYOUT.WGMMA.reduce(1)


def decode(q, k, v, raw_gate, raw_beta, A_log, dt_bias, lower_bound, pool, slots, *, interpret=False):
    """Outputs [R,HV,V] and the next pool."""
    R, H, K = q.shape
    HV, V = v.shape[1:]
    groups = HV // H
    width = min(K, 128 // pool.dtype.itemsize)  # the narrowest slice of a swizzled tile: fewest registers
    chunks = [(start, width) for start in range(0, K, width)]

    def body(*refs, s, vectors, bar):
        refs = list(refs)
        slots, q, k, v, raw_gate, raw_beta = (refs.pop(0) for _ in range(6))
        A_log_ref = None if A_log is None else refs.pop(0)
        dt_bias, pool, o = refs
        b, h, tile = (jax.lax.axis_index(n) for n in "bhv")
        rows, slot = pl.ds(tile * ROWS, ROWS), slots[b]
        hk = h if groups == 1 else jax.lax.div(h, groups)

        def once(ref):  # one channel a lane: nothing is computed twice within a program
            return plgpu.load(ref, layout=LAYOUT.WG_STRIDED((K,), vec_size=1), optimized=False).astype(FLOAT)

        def across(ref, chunk):
            x = plgpu.load(ref.at[pl.ds(*chunk)], layout=COLUMNS, optimized=False)
            return jax.lax.broadcast_in_dim(x, (ROWS, width), (1,))

        @pl.when(slot > 0)
        def _():
            tile_ref = pool.at[slot, h, rows]
            plgpu.copy_gmem_to_smem(tile_ref, s, bar)
            rate = 1.0 if A_log is None else jnp.exp(A_log_ref[h])
            key, query = once(k.at[b, hk]), once(q.at[b, hk])
            key = key * jax.lax.rsqrt((key * key).sum() + 1e-6)
            query = query * (jax.lax.rsqrt((query * query).sum() + 1e-6) * K**-0.5)
            overlap = (key * query).sum()
            vectors[0][...] = key
            vectors[1][...] = query
            vectors[2][...] = token_decay(once(raw_gate.at[b, h]), once(dt_bias.at[h]), rate, lower_bound)
            value = plgpu.load(v.at[b, h, rows], layout=VALUES, optimized=False).astype(FLOAT)
            beta = sigmoid(raw_beta[b, h].astype(FLOAT))
            plgpu.commit_smem()
            plgpu.barrier_wait(bar)
            seen = read = None  # summed over the row once, after all chunks
            for chunk in chunks:
                state = plgpu.load(s.at[:, pl.ds(*chunk)], layout=LAYOUT.WGMMA).astype(FLOAT) * across(
                    vectors[2], chunk
                )
                one, two = state * across(vectors[0], chunk), state * across(vectors[1], chunk)
                seen, read = (one, two) if seen is None else (seen + one, read + two)
            seen, read = seen.sum(1), read.sum(1)
            correction = beta * (value - seen)
            put = jax.lax.broadcast_in_dim(correction, (ROWS, width), (0,))
            for chunk in chunks:
                state = plgpu.load(s.at[:, pl.ds(*chunk)], layout=LAYOUT.WGMMA).astype(FLOAT) * across(
                    vectors[2], chunk
                )
                s[:, pl.ds(*chunk)] = (state + put * across(vectors[0], chunk)).astype(pool.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(s, tile_ref)
            store(o.at[b, h, rows], (read + correction * overlap).astype(o.dtype))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(slot <= 0)
        def _():
            store(o.at[b, h, rows], plgpu.layout_cast(jnp.zeros((ROWS,), o.dtype), VALUES))

    inputs = [slots.astype(jnp.int32), q, k, v, raw_gate, raw_beta] + ([] if A_log is None else [A_log]) + [dt_bias]
    ref = jax.new_ref(pool)
    o = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((R, HV, V), v.dtype),
        grid=(R, HV, V // ROWS),
        grid_names=("b", "h", "v"),
        scratch_types=dict(
            s=smem((ROWS, K), pool.dtype),
            vectors=[plgpu.SMEM((K,), FLOAT) for _ in range(3)],
            bar=plgpu.Barrier(num_arrivals=1),
        ),
        interpret=interpret_params(interpret),
        kernel_name="kda_decode",
    )(*inputs, ref)
    return o, jax.freeze(ref)
