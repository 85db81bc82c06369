"""Commit of all layers in one launch: one program a (layer and row, value head, 64 value rows)."""

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
    twice,
    window_swizzle,
)
from pallas_kernels.mosaic.preparation import padded_window, prepare_commit


def commit(
    pool, correction, key, raw_gate, A_log, dt_bias, lower_bound, commit_length, source_slot, final_slot,
    boundary_slot=None, boundary_length=None, *, interpret=False,
):  # fmt: skip
    """The next pool [L,N,HV,V,K]; the last two plan fields are None when no boundary can be written."""
    L, _N, HV, V, K = pool.shape
    R, W = key.shape[1], key.shape[3]
    P = padded_window(W)
    both = boundary_slot is not None
    plan = [commit_length, source_slot, final_slot] + ([boundary_slot, boundary_length] if both else [])
    plan = [x.astype(jnp.int32) for x in plan]
    lengths = [plan[0]] + ([plan[4]] if both else [])
    kd, total = prepare_commit(key, raw_gate, A_log, dt_bias, lower_bound, lengths, interpret=interpret)
    if W != P:
        correction = jnp.pad(correction, [(0, 0)] * 3 + [(0, P - W), (0, 0)])

    def body(*refs, s, ks, bar, s2=None, ks2=None):
        refs = list(refs)
        correction, kd, total, commit_length, source_slot, final_slot = (refs.pop(0) for _ in range(6))
        if both:
            boundary_slot, boundary_length = refs.pop(0), refs.pop(0)
        (pool,) = refs
        lr, h, tile = (jax.lax.axis_index(n) for n in "bhv")
        layer, r = jax.lax.div(lr, R), jax.lax.rem(lr, R)
        rows = pl.ds(tile * ROWS, ROWS)

        def update(target, length, keys, destination):
            put = load_transposed(correction.at[layer, r, h, :, rows], P, P)
            put = jnp.where(columns_below((ROWS, P), length), put, jnp.zeros_like(put))
            put = [twice(term) for term in split(put)]

            def finish():
                for start in range(0, K, CHUNK):
                    chunk = pl.ds(start, CHUNK)
                    d = plgpu.load(total.at[target, lr, h, chunk], layout=LAYOUT.WGMMA.reduce(0), optimized=False)
                    state = plgpu.load(s.at[:, chunk], layout=LAYOUT.WGMMA).astype(FLOAT)
                    state = state * jax.lax.broadcast_in_dim(d, state.shape, (1,))
                    state = accumulate(state, [(term, keys.at[:, chunk], False) for term in put], interpret)
                    destination[:, chunk] = state.astype(pool.dtype)

            return finish

        @pl.when(commit_length[r] > 0)
        def _():
            plgpu.copy_gmem_to_smem(pool.at[layer, source_slot[r], h, rows], s, bar)
            plgpu.copy_gmem_to_smem(kd.at[0, lr, h], ks, bar)
            if both:
                plgpu.copy_gmem_to_smem(kd.at[1, lr, h], ks2, bar)
            final = update(0, commit_length[r], ks, s)
            plgpu.barrier_wait(bar)
            if both:

                @pl.when(boundary_slot[r] > 0)
                def _():
                    update(1, boundary_length[r], ks2, s2)()
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(s2, pool.at[layer, boundary_slot[r], h, rows])

            final()
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(s, pool.at[layer, final_slot[r], h, rows])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    scratch = dict(
        s=smem((ROWS, K), pool.dtype),
        ks=smem((2 * P, K), jnp.bfloat16, window_swizzle(2 * P)),
        bar=plgpu.Barrier(num_arrivals=3 if both else 2),
    )
    if both:
        scratch.update(s2=smem((ROWS, K), pool.dtype), ks2=smem((2 * P, K), jnp.bfloat16, window_swizzle(2 * P)))
    ref = jax.new_ref(pool)
    plgpu.kernel(
        body,
        out_type=(),
        grid=(L * R, HV, V // ROWS),
        grid_names=("b", "h", "v"),
        scratch_types=scratch,
        interpret=interpret_params(interpret),
        kernel_name="kda_commit",
    )(correction, kd, total, *plan, ref)
    return jax.freeze(ref)
