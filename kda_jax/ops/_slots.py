"""Reading and writing rows of a slot pool, where slot 0 is the null slot: never read as state, never written.

A pool is [L, N, ...] here, with a leading layer axis.
"""

import jax
import jax.numpy as jnp

UNROLLED_ROWS = 4  # up to this many rows are written one by one: always in place, where a scatter may copy the pool


def expand(mask, ndim: int):
    """``mask`` with trailing axes of size 1 up to ``ndim`` axes."""
    return mask.reshape(mask.shape + (1,) * (ndim - mask.ndim))


def read_slots(pool, slots):
    """Rows ``pool[:, slots]``, zero where the slot is null: [L, N, ...], [R] -> [L, R, ...]."""
    pool = jnp.asarray(pool)
    if slots.shape[0] > UNROLLED_ROWS:
        rows = pool[:, slots]
    else:
        rows = jnp.concatenate([_row(pool, slots[row]) for row in range(slots.shape[0])] or [pool[:, :0]], axis=1)
    return jnp.where(expand(slots > 0, pool.ndim - 1)[None], rows, 0)


def _row(pool, slot):
    # the same slice that ``write_slots`` updates: XLA then knows that the update can be made in place
    return jax.lax.dynamic_slice_in_dim(pool, slot, 1, axis=1, allow_negative_indices=False)


def write_slots(pool, slots, rows):
    """``pool`` [L, N, ...] with ``rows`` [L, R, ...] written to ``slots`` [R]; null slots change nothing at all."""
    pool, rows = jnp.asarray(pool), rows.astype(pool.dtype)
    if slots.shape[0] > UNROLLED_ROWS:
        target = jnp.where(slots > 0, slots, pool.shape[1])
        return pool.at[:, target].set(rows, mode="drop")
    for row in range(slots.shape[0]):
        new = jax.lax.slice_in_dim(rows, row, row + 1, axis=1)
        named = (slots[row] > 0) & (slots[row] < pool.shape[1])  # the update is moved back inside the pool otherwise
        new = jnp.where(named, new, _row(pool, slots[row]))
        pool = jax.lax.dynamic_update_slice_in_dim(pool, new, slots[row], axis=1, allow_negative_indices=False)
    return pool
