"""Reading and writing rows of a slot pool, where slot 0 is the null slot: never read as state, never written.

A pool may have a leading layer axis; it is addressed as one pool of ``L * N`` slots, so that all layers move in one
gather and one scatter.
"""

import jax.numpy as jnp


def expand(mask, ndim: int):
    """``mask`` with trailing axes of size 1 up to ``ndim`` axes."""
    return mask.reshape(mask.shape + (1,) * (ndim - mask.ndim))


def read_slots(pool, slots):
    """Rows ``pool[slots]``, zero where the slot is null: [N, ...], [R] -> [R, ...]."""
    return jnp.where(expand(slots > 0, pool.ndim), pool[slots], 0)


def write_slots(pool, slots, rows):
    """``pool`` with ``rows`` [R, ...] written to ``slots`` [R]; null slots are dropped, all else is untouched."""
    target = jnp.where(slots > 0, slots, pool.shape[0])
    return pool.at[target].set(rows.astype(pool.dtype), mode="drop")


def layered_slots(slots, layers: int, slots_per_layer: int):
    """Slots [R] of each layer as slots of the flattened pool: int32 [L * R], null staying null."""
    base = jnp.arange(layers, dtype=slots.dtype)[:, None] * slots_per_layer
    return jnp.where(slots[None] > 0, slots[None] + base, 0).reshape(-1)
