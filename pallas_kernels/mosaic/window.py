"""Verify, and verify with the previous step's commit folded in: one program a (row, value head, 64 value rows)."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic._tile import (
    CHUNK,
    FLOAT,
    LAYOUT,
    ROWS,
    accumulate,
    columns_below,
    interpret_params,
    load_transposed,
    smem,
    split,
    store_transposed,
    twice,
    window_swizzle,
    zeros,
)
from pallas_kernels.mosaic.preparation import padded_window, prepare_window


def _values(x):
    """The bf16 terms of a [64, P] window, each beside itself: to meet (high; low) stacked operands."""
    if x.dtype == jnp.bfloat16:
        return [twice(x)]
    return [twice(term) for term in split(x.astype(FLOAT))]


def fold_chunk(state, put, kd, interpret):
    """``state`` [64, CHUNK] plus the corrections' outer products with the decayed keys."""
    return accumulate(state, [(term, kd, False) for term in put], interpret)


def _launch(v, X, C, pool, slots, lengths, pending, *, interpret):
    """``pending``: None or (correction [R,HV,P,V], kd, total, commit_length, source_slot, final_slot)."""
    R, P, HV, V = v.shape
    K, fold = X.shape[-1], pending is not None

    def body(*refs, s, xs, cs, bar, ks=None):
        refs = list(refs)
        slots, lengths, v, X, C = (refs.pop(0) for _ in range(5))
        if fold:
            correction, kd, total, commit_length, source_slot, final_slot = (refs.pop(0) for _ in range(6))
        pool, o, u = refs
        b, h, tile = (jax.lax.axis_index(n) for n in "bhv")
        rows = pl.ds(tile * ROWS, ROWS)
        length = jnp.where(slots[b] > 0, lengths[b], 0)
        active, source = length > 0, slots[b]
        if fold:
            committed = commit_length[b]
            active, source = active | (committed > 0), jnp.where(committed > 0, source_slot[b], source)

        @pl.when(active)
        def _():
            plgpu.copy_gmem_to_smem(pool.at[source, h, rows], s, bar)
            plgpu.copy_gmem_to_smem(X.at[b, h], xs, bar)
            plgpu.copy_gmem_to_smem(C.at[b, h], cs, bar)
            value = load_transposed(v.at[b, :, h, rows], P, P)
            value = jnp.where(columns_below((ROWS, P), length), value, jnp.zeros_like(value))
            if fold:
                plgpu.copy_gmem_to_smem(kd.at[b, h], ks, bar)
                put = load_transposed(correction.at[b, h, :, rows], P, P)
                put = _values(jnp.where(columns_below((ROWS, P), committed), put, jnp.zeros_like(put)))
            plgpu.barrier_wait(bar)
            acc = accumulate(zeros((ROWS, 2 * P)), [(term, cs, True) for term in _values(value)], interpret)
            for start in range(0, K, CHUNK):
                chunk = pl.ds(start, CHUNK)
                state = plgpu.load(s.at[:, chunk], layout=LAYOUT.WGMMA).astype(FLOAT)
                if fold:
                    d = plgpu.load(total.at[b, h, chunk], layout=LAYOUT.WGMMA.reduce(0), optimized=False)
                    state = state * jax.lax.broadcast_in_dim(d, state.shape, (1,))
                    state = fold_chunk(state, put, ks.at[:, chunk], interpret)
                    rounded = state.astype(pool.dtype)
                    s[:, chunk] = rounded
                    state = rounded.astype(FLOAT)
                terms = split(state) if pool.dtype != jnp.bfloat16 else [state.astype(jnp.bfloat16)]
                products = [
                    (terms[0], xs.at[pl.ds(0, 2 * P), chunk], True),
                    (terms[0], xs.at[pl.ds(2 * P, 2 * P), chunk], True),
                ]
                products += [(term, xs.at[pl.ds(0, 2 * P), chunk], True) for term in terms[1:]]
                acc = accumulate(acc, products, interpret)
            if fold:
                plgpu.commit_smem()

                @pl.when(committed > 0)
                def _():
                    plgpu.copy_smem_to_gmem(s, pool.at[final_slot[b], h, rows])

            keep = columns_below((ROWS, P), length)
            none = zeros((ROWS, P))
            store_transposed(u.at[b, h, :, rows], jnp.where(keep, acc[:, :P], none))
            store_transposed(o.at[b, :, h, rows], jnp.where(keep, acc[:, P:], none).astype(o.dtype))
            if fold:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(jnp.logical_not(active))
        def _():
            store_transposed(u.at[b, h, :, rows], zeros((ROWS, P)))
            store_transposed(o.at[b, :, h, rows], zeros((ROWS, P)).astype(o.dtype))

    scratch = dict(
        s=smem((ROWS, K), pool.dtype),
        xs=smem((4 * P, K), jnp.bfloat16),
        cs=smem((2 * P, 2 * P), jnp.bfloat16, window_swizzle(2 * P)),
        bar=plgpu.Barrier(num_arrivals=4 if fold else 3),
    )
    if fold:
        scratch["ks"] = smem((2 * P, K), jnp.bfloat16, window_swizzle(2 * P))
    kernel = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((R, P, HV, V), v.dtype),
            jax.ShapeDtypeStruct((R, HV, P, V), FLOAT),
        ),
        grid=(R, HV, V // ROWS),
        grid_names=("b", "h", "v"),
        scratch_types=scratch,
        interpret=interpret_params(interpret),
        kernel_name="kda_verify_after_commit" if fold else "kda_verify",
    )
    if not fold:
        return kernel(slots, lengths, v, X, C, pool)
    ref = jax.new_ref(pool)
    o, u = kernel(slots, lengths, v, X, C, *pending, ref)
    return o, u, jax.freeze(ref)


def _pad(x, axis, P):
    if x.shape[axis] == P:
        return x
    pads = [(0, 0)] * x.ndim
    pads[axis] = (0, P - x.shape[axis])
    return jnp.pad(x, pads)


def verify(q, k, v, raw_gate, raw_beta, A_log, dt_bias, lower_bound, pool, slots, lengths, *, interpret=False):
    """Outputs [R,W,HV,V], correction [R,HV,W,V] fp32, key [R,H,W,K], raw gate [R,HV,W,K]; the pool is only read."""
    W = q.shape[1]
    P = padded_window(W)
    slots, lengths = slots.astype(jnp.int32), lengths.astype(jnp.int32)
    X, C, key, raw = prepare_window(
        q, k, raw_gate, raw_beta, A_log, dt_bias, lower_bound, slots, lengths, interpret=interpret
    )
    o, u = _launch(_pad(v, 1, P), X, C, pool, slots, lengths, None, interpret=interpret)
    return o[:, :W], u[:, :, :W], key, raw


def verify_after_commit(
    q, k, v, raw_gate, raw_beta, A_log, dt_bias, lower_bound, pool, correction, key, raw_gate_record, commit_length,
    source_slot, final_slot, slots, lengths, *, interpret=False,
):  # fmt: skip
    """Fold the previous step's records into each row's state, write it to ``final_slot``, verify from it.

    Rows with ``commit_length`` 0 write nothing and start from ``slots``. Returns as ``verify``, then the next pool.
    """
    W = q.shape[1]
    P = padded_window(W)
    slots, lengths, commit_length, source_slot, final_slot = (
        x.astype(jnp.int32) for x in (slots, lengths, commit_length, source_slot, final_slot)
    )
    X, C, new_key, raw, kd, total = prepare_window(
        q, k, raw_gate, raw_beta, A_log, dt_bias, lower_bound, slots, lengths, (key, raw_gate_record, commit_length),
        interpret=interpret,
    )  # fmt: skip
    pending = (_pad(correction, 2, P), kd, total, commit_length, source_slot, final_slot)
    o, u, pool = _launch(_pad(v, 1, P), X, C, pool, slots, lengths, pending, interpret=interpret)
    return o[:, :W], u[:, :, :W], new_key, raw, pool
