"""Calling the operations under jit, once per shape, and looking at pools."""

import functools

import jax
import numpy as np

from kda_jax import ops
from tests.tolerances import assert_close

# Compiling takes most of the time: on CPU the optimiser is left out, unless --slow is given (conftest.py).
optimise = False


def compiled(f):
    """`f` under jit."""
    quick = jax.default_backend() == "cpu" and not optimise
    return jax.jit(f, compiler_options={"xla_backend_optimization_level": 0} if quick else None)


@functools.cache
def jitted(name, **static):
    """The operation `name`, with these keyword arguments fixed, compiled; it takes the others as usual."""
    return compiled(functools.partial(getattr(ops, name), **static))


def calls(*operations):
    """Mark a test as calling these operations with its `implementation`, not those of its module."""

    def mark(test):
        test.operations = operations
        return test

    return mark


def plan_of(plan, **static):
    """The op's plan from any object that has the five fields (int32 arrays)."""
    names = ("commit_length", "source_slot", "final_slot", "boundary_slot", "boundary_length")
    return ops.CommitPlan(**{name: np.asarray(getattr(plan, name), np.int32) for name in names}, **static)


def records_of(records):
    """The op's records from the oracle's: the correction in fp32, the rest as it is."""
    return ops.Records(records.correction.astype(np.float32), records.key, records.raw_gate)


def bits(x):
    """The bytes of an array, for comparisons in which NaN equals itself."""
    x = np.asarray(x)
    return np.ascontiguousarray(x).view(np.uint8).reshape(*x.shape[:-1], -1)


def assert_same_bits(x, ref, what):
    x, ref = np.asarray(x), np.asarray(ref)
    assert x.dtype == ref.dtype, f"{what}: dtype {x.dtype}, expected {ref.dtype}"
    np.testing.assert_array_equal(bits(x), bits(ref), err_msg=what)


def assert_pool(new, old, written, limit, what="pool"):
    """Slots in `written` ({slot: contents}) hold those contents; every other slot, NaN or not, is as it was."""
    new, old = np.asarray(new), np.asarray(old)
    assert new.shape == old.shape
    assert new.dtype == old.dtype
    for slot, contents in written.items():
        assert_close(new[slot], contents, limit, f"{what}, slot {slot}")
    others = [s for s in range(len(old)) if s not in written]
    assert_same_bits(new[others], old[others], f"{what}: slots nobody named")


def assert_zero_past(x, lengths, what):
    """x [B, T, ...] is exactly zero at and past each row's length."""
    for b, (row, n) in enumerate(zip(np.asarray(x).astype(np.float32), lengths, strict=True)):
        assert not row[n:].any(), f"{what}: row {b} is not zero past {n}"
        assert np.isfinite(row[n:]).all(), f"{what}: row {b} is not finite past {n}"
