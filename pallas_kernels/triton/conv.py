"""The short convolution of a window and its commit: programs over (row, block of channels), nothing prepared."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import values
from pallas_kernels.triton._launch import BLOCKS, FLOAT, along, block_rows, load, named, store, within


def conv_step(x, weight, pool, slots, lengths, *, interpret=False):
    """Outputs [R,W,C]; ``weight`` [C,Wc], ``pool`` [N,Wc-1,C] is only read."""
    inputs = {"x": x, "weight": weight, "pool": pool, "slots": slots, "lengths": lengths}
    (y,) = _launch(
        _step_body, "kda_conv_step", x.shape, inputs, {"y": jax.ShapeDtypeStruct(x.shape, x.dtype)}, interpret
    )
    return y


def conv_step_after_commit(
    x, weight, pool, x_pending, commit_length, source_slot, final_slot, slots, lengths, *, interpret=False
):
    """What ``conv_step`` returns, on histories moved past the tokens of ``x_pending`` that stand, and the next pool."""
    inputs = {"x": x, "weight": weight, "pool": pool, "slots": slots, "lengths": lengths, "x_pending": x_pending}
    inputs |= {"commit_length": commit_length, "source_slot": source_slot, "final_slot": final_slot}
    outputs = {"y": jax.ShapeDtypeStruct(x.shape, x.dtype), "next_pool": "pool"}
    return _launch(_step_body, "kda_conv_step_after_commit", x.shape, inputs, outputs, interpret)


def conv_commit(
    pool, x, commit_length, source_slot, final_slot, boundary_slot=None, boundary_length=None, *, interpret=False
):
    """The next pool [L,N,Wc-1,C] from ``x`` [L,R,W,C]. Slots of different rows must differ."""
    inputs = {"pool": pool, "x": x, "commit_length": commit_length, "source_slot": source_slot}
    inputs |= {"final_slot": final_slot, "boundary_slot": boundary_slot, "boundary_length": boundary_length}
    (pool,) = _launch(_commit_body, "kda_conv_commit", x.shape, inputs, {"next_pool": "pool"}, interpret)
    return pool


def _launch(body, name, shape, inputs, outputs, interpret):
    *layers, R, _, C = shape
    channels = block_rows("conv", C)
    return named(
        lambda refs: body(refs, channels),
        inputs,
        outputs,
        name=name,
        grid=(pl.cdiv(C, channels), R, *layers),
        warps=BLOCKS["conv"].warps,
        interpret=interpret,
    )


def _moved(x_ref, x_at, channel, inside, load_history, n, width):
    """Rows ``n .. n + width - 1`` of the history followed by ``x``."""
    rows = []
    for i in range(width):
        place = n + i
        old = place < width
        was = load_history(jnp.where(old, place, 0), old)
        now = load(x_ref, (*x_at, jnp.where(old, 0, place - width), channel), ~old, inside)
        rows.append(jnp.where(old, was, now.astype(was.dtype)))
    return rows


def _step_body(refs, channels):
    start, r = pl.program_id(0) * channels, pl.program_id(1)
    _, W, C = refs.x.shape
    width = refs.weight.shape[1] - 1
    channel = along(1, channels, start)
    inside = within(channel, C, channels)
    slot = refs.slots[r]
    if hasattr(refs, "next_pool"):
        n = refs.commit_length[r]
        pending = n > 0
        source, final = jnp.where(pending, refs.source_slot[r], slot), refs.final_slot[r]

        def load_history(i, mask):
            return load(refs.pool, (source, i, channel), mask & (source > 0), inside)

        history = _moved(refs.x_pending, (r,), channel, inside, load_history, n, width)
        for i, x in enumerate(history):
            store(refs.next_pool, (final, i, channel), x, pending & (final > 0), inside)
    else:
        history = [load(refs.pool, (slot, i, channel), slot > 0, inside) for i in range(width)]
    length = jnp.where(slot > 0, refs.lengths[r], 0)
    rows = [h.astype(refs.x.dtype).astype(FLOAT) for h in history]
    rows += [load(refs.x, (r, t, channel), t < length, inside).astype(FLOAT) for t in range(W)]
    taps = [load(refs.weight, (channel, j), inside).astype(FLOAT) for j in range(width + 1)]
    for t, y in enumerate(values.convolve(rows, taps, W)):
        store(refs.y, (r, t, channel), jnp.where(t < length, y, 0.0), inside)


def _commit_body(refs, channels):
    start, r = pl.program_id(0) * channels, pl.program_id(1)
    layer = (pl.program_id(2),)
    C, width = refs.pool.shape[-1], refs.pool.shape[-2]
    channel = along(1, channels, start)
    inside = within(channel, C, channels)
    n, source = refs.commit_length[r], refs.source_slot[r]

    @pl.when((n > 0) & (source > 0))
    def _():
        def load_history(i, mask):
            return load(refs.pool, (*layer, source, i, channel), mask, inside)

        targets = [(refs.final_slot[r], n)]
        if hasattr(refs, "boundary_slot"):
            targets.append((refs.boundary_slot[r], refs.boundary_length[r]))
        moved = [
            _moved(refs.x, (*layer, r), channel, inside, load_history, length, width) for _, length in targets
        ]  # all of them read before anything is written
        for (slot, _), rows in zip(targets, moved, strict=True):
            for i, x in enumerate(rows):
                store(refs.next_pool, (*layer, slot, i, channel), x, slot > 0, inside)
