"""The TPU route lowers for a TPU, and its kernels are right in the TPU interpreter. None of it has run on one here."""

import jax
import numpy as np
import pytest

from pallas_kernels import tpu
from tests import oracle
from tests.kernels.lowering import BF16, F32, SWEEP, Sizes, arguments, lower
from tests.ops import inputs
from tests.ops.harness import assert_pool, assert_zero_past
from tests.tolerances import assert_close, tolerance

OPS = ("decode", "verify", "commit", "verify_after_commit")


@pytest.mark.parametrize("sizes", SWEEP, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_lowers(op, sizes):
    text = lower(getattr(tpu, op), arguments(op, sizes), "tpu", lower_bound=None)
    assert text.count("custom_call @tpu_custom_call") == 1


@pytest.mark.parametrize("op", OPS)
def test_other_gates_and_plans(op):
    kwargs = arguments(op, Sizes(), rate=False, boundary=False)
    assert lower(getattr(tpu, op), kwargs, "tpu", lower_bound=-5.0).count("custom_call @tpu_custom_call") == 1


def test_what_it_supports():
    good = {"K": 128, "V": 128, "W": 8, "dtype": BF16, "state_dtype": F32}
    assert tpu.supports("verify", **good) is None
    for change, said in (
        ({"K": 24}, "K"), ({"V": 272}, "V"), ({"W": 0}, "window"), ({"dtype": np.int32}, "activations"),
        ({"state_dtype": np.float16}, "pool"),
    ):  # fmt: skip
        assert said in tpu.supports("verify", **(good | change))
    assert "conv_step" in tpu.supports("conv_step", **good)


# --- values ----------------------------------------------------------------------------------------------------------

DIMS = inputs.Dims(1, 2, 16, 32)
SLOTS, N, W = np.array([3, 0, 2, 5], np.int32), 8, 3
LENGTHS = np.array([3, 3, 1, 0], np.int32)
CASES = [(inputs.F32, None), (inputs.BF16, -5.0)]


def draw(seed, dtype, lower_bound):
    g = inputs.gate(seed, DIMS, lower_bound)
    decays = inputs.DECAYS if lower_bound is None else inputs.BOUNDED_DECAYS
    x = inputs.tokens(seed, len(SLOTS), W, DIMS, dtype, g, decays)
    return x, g, inputs.states(seed, N, DIMS, nan_slots=(0, 6)), (g.A_log, g.dt_bias)


@pytest.mark.parametrize(("dtype", "lower_bound"), CASES)
def test_decode(dtype, lower_bound):
    x, g, pool, gate = draw(1, dtype, lower_bound)
    one = [a[:, 0] for a in x]
    o, new = jax.jit(lambda *a: tpu.decode(*a[:7], lower_bound, *a[7:], interpret=True))(*one, *gate, pool, SLOTS)
    o_ref, pool_ref = oracle.decode(*one, g, pool, SLOTS)
    live = SLOTS > 0
    assert_close(np.asarray(o)[live], o_ref[live], tolerance(dtype).output, "o")
    assert not np.asarray(o)[~live].any()
    assert_pool(new, pool, {s: pool_ref[s] for s in SLOTS[live]}, tolerance(dtype).state)


@pytest.mark.parametrize(("dtype", "lower_bound"), CASES)
def test_verify_and_commit(dtype, lower_bound):
    x, g, pool, gate = draw(2, dtype, lower_bound)
    x = [inputs.nan_past(a, np.where(SLOTS == 0, 0, LENGTHS)) for a in x]
    verify = jax.jit(lambda *a: tpu.verify(*a[:7], lower_bound, *a[7:], interpret=True))
    o, *records = verify(*x, *gate, pool, SLOTS, LENGTHS)
    o_ref, want = oracle.verify(*x, g, pool, SLOTS, LENGTHS)
    live = np.where(SLOTS == 0, 0, LENGTHS)
    assert_zero_past(o, live, "o")
    for r in np.flatnonzero(live):
        assert_close(o[r], o_ref[r], tolerance(dtype).output, f"o, row {r}")
        assert_close(records[0][r], want.correction[r], tolerance(dtype).state, f"correction, row {r}")
    np.testing.assert_array_equal(records[1], want.key)
    np.testing.assert_array_equal(records[2], want.raw_gate)

    # row 0 crosses from block 3 to block 4, row 2 ends where its block does
    table, computed = np.array([[3, 4], [0, 0], [1, 2], [5, 0]], np.int32), [6, 3, 15, 7]
    plan = oracle.plan_commit([3, 1, 1, 1], LENGTHS, SLOTS, table, computed, 8)
    assert sorted(np.unique(plan.boundary_slot)) == [0, 2, 3]
    commit = jax.jit(lambda *a: tpu.commit(*a[:6], lower_bound, *a[6:], interpret=True))
    layers = [np.stack([a, a]) for a in (pool, *records, *gate)]
    for stop, slots in ((3, plan._replace(boundary_slot=0 * plan.boundary_slot)), (5, plan)):
        new = commit(*layers, *slots[:stop])
        for layer in range(2):
            assert_pool(new[layer], pool, oracle.commit(pool, *x, g, slots), tolerance(dtype).state)


@pytest.mark.parametrize(("dtype", "lower_bound"), CASES)
def test_verify_after_commit(dtype, lower_bound):
    """Row 2 has nothing pending, row 3 only commits."""
    old, g, pool, gate = draw(3, dtype, lower_bound)
    new = draw(4, dtype, lower_bound)[0]
    full = np.full(len(SLOTS), W, np.int32)
    records = oracle.verify(*old, g, pool, SLOTS, full)[1]
    plan = oracle.plan_commit([2, 2, 0, 3], full, SLOTS)
    run = jax.jit(lambda *a: tpu.verify_after_commit(*a[:7], lower_bound, *a[7:], interpret=True))
    o, correction, _, _, after = run(
        *new, *gate, pool, records.correction.astype(np.float32), *records[1:], *plan[:3], SLOTS, LENGTHS
    )
    written = oracle.commit(pool, *old, g, plan)
    assert_pool(after, pool, written, tolerance(dtype).state)
    committed = oracle.f64(pool)
    for slot, state in written.items():
        committed[slot] = state
    o_ref, want = oracle.verify(*new, g, committed, SLOTS, LENGTHS)
    for r in np.flatnonzero(np.where(SLOTS == 0, 0, LENGTHS)):
        assert_close(o[r], o_ref[r], tolerance(dtype).output, f"o, row {r}")
        assert_close(correction[r], want.correction[r], tolerance(dtype).state, f"correction, row {r}")
