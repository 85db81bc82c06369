"""Commit of all layers in one launch, on the pool in place: programs over (layer, row, group of value heads)."""

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu._launch import (
    FLOAT,
    call,
    gate_arrays,
    gate_block,
    heads_of_program,
    in_hbm,
    row_block,
    write_states,
)
from pallas_kernels.tpu.window import fold_records, pending_arrays


def commit(
    pool, correction, key, raw_gate, A_log, dt_bias, lower_bound, commit_length, source_slot, final_slot,
    boundary_slot=None, boundary_length=None, *, interpret=False,
):  # fmt: skip
    """The next pool [L,N,HV,V,K]. Rows must not share slots: a row's states are written as soon as it is done."""
    L, R, HV, _, V = correction.shape
    K, heads = pool.shape[4], heads_of_program(HV)
    scalars = [commit_length, source_slot, final_slot]
    if boundary_slot is not None:
        scalars += [boundary_slot, boundary_length]
    inputs = [*pending_arrays(correction, key, raw_gate, HV), *gate_arrays(A_log, dt_bias), pool]
    tile = inputs[0].shape[-2]
    specs = [row_block(heads, tile, size, lead=2) for size in (V, K, K)] + [gate_block(heads, K, lead=1)] * 2
    specs.append(
        pl.BlockSpec((None, None, heads, V, K), lambda layer, r, g, n, source, *_: (layer, source[r], g, 0, 0))
    )
    (pool,) = call(
        functools.partial(_body, targets=len(scalars) // 2, heads=heads, lower_bound=lower_bound),
        name="kda_commit", grid=(L, R, HV // heads), scalars=scalars, inputs=inputs, specs=specs,
        outputs=[jax.ShapeDtypeStruct(pool.shape, pool.dtype)], out_specs=[in_hbm()],
        scratch=[pltpu.VMEM((heads, V, K), pool.dtype), pltpu.SemaphoreType.DMA],
        aliases={len(inputs) - 1: 0}, interpret=interpret,
    )  # fmt: skip
    return pool


def _body(*refs, targets, heads, lower_bound):
    layer, r, group = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    commit_length, source, *refs = refs
    slots_and_lengths = [(refs.pop(0), commit_length)]
    if targets == 2:
        slots_and_lengths.append((refs.pop(0), refs.pop(0)))
    correction, key, raw_gate, rate, bias, pool, next_pool, scratch, semaphore = refs
    for slots, lengths in slots_and_lengths:
        slot = slots[r]

        @pl.when((commit_length[r] > 0) & (source[r] > 0) & (slot > 0))
        def _(slot=slot, lengths=lengths):
            for h in range(heads):
                record = correction[h], key[h], raw_gate[h], bias[h], rate[h], lower_bound, lengths[r]
                scratch[h] = fold_records(pool[h].astype(FLOAT), *record).astype(scratch.dtype)
            write_states(scratch, semaphore, next_pool.at[layer, slot, pl.ds(group * heads, heads)])
