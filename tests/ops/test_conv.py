"""conv_prefill, conv_step and conv_commit."""

import jax
import numpy as np
import pytest

from kda_jax import ops
from tests import oracle
from tests.ops.harness import assert_pool, assert_same_bits, assert_zero_past, calls, compiled, jitted, plan_of
from tests.ops.inputs import BF16, F32, nan_past, pool, rng
from tests.tolerances import assert_close, tolerance

OPS = ("conv_step", "conv_commit")
PREFILL_ONLY = calls("conv_prefill")
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
C = 10


def draw(seed, B, T, taps=4, dtype=F32):
    r = rng(seed)
    x, history = r.normal(size=(B, T, C)).astype(dtype), r.normal(size=(B, taps - 1, C)).astype(dtype)
    return x, r.normal(size=(C, taps)).astype(dtype), history


def check(out, ref, dtype):
    (y, history), (y_ref, history_ref) = out, ref
    assert y.dtype == dtype
    assert_close(y, y_ref, tolerance(dtype).output, "y")
    assert_same_bits(history, history_ref.astype(dtype), "history")


@PREFILL_ONLY
@DTYPES
@pytest.mark.parametrize("T", [1, 2, 3, 17])
def test_prefill(implementation, T, dtype):
    x, weight, history = draw(1, 2, T, dtype=dtype)
    run = jitted("conv_prefill", implementation=implementation)
    check(run(x, weight), oracle.conv_prefill(x, weight), dtype)
    check(run(x, weight, history=history), oracle.conv_prefill(x, weight, history), dtype)


@PREFILL_ONLY
@pytest.mark.parametrize("taps", [2, 3, 5])
def test_other_widths(implementation, taps):
    x, weight, history = draw(2, 2, 6, taps)
    out = jitted("conv_prefill", implementation=implementation)(x, weight, history=history)
    check(out, oracle.conv_prefill(x, weight, history), F32)


@PREFILL_ONLY
@DTYPES
def test_lengths_with_nan_in_the_padding(implementation, dtype):
    lengths = np.array([0, 1, 2, 3, 7, 9], np.int32)
    x, weight, history = draw(3, len(lengths), 9, dtype=dtype)
    x = nan_past(x, lengths)
    run = jitted("conv_prefill", implementation=implementation)
    for kept in (None, history):
        y, after = run(x, weight, history=kept, lengths=lengths)
        check((y, after), oracle.conv_prefill(x, weight, kept, lengths), dtype)
        assert_zero_past(y, lengths, "y")


@PREFILL_ONLY
def test_gradients_stop_at_lengths(implementation):
    lengths = np.array([0, 2, 5], np.int32)
    x, weight, history = draw(4, 3, 5)
    dy, dh = rng(5).normal(size=x.shape).astype(F32), rng(6).normal(size=history.shape).astype(F32)

    def loss(x, weight, history):
        y, after = ops.conv_prefill(x, weight, history=history, lengths=lengths, implementation=implementation)
        return (y * dy).sum() + (after * dh).sum()

    got = compiled(jax.grad(loss, argnums=(0, 1, 2)))(nan_past(x, lengths), weight, history)
    assert_zero_past(got[0], lengths, "dx")

    def reference(arguments):
        y, after = oracle.conv_prefill(*arguments, lengths=lengths)
        return (y * dy).sum() + (after * dh).sum()

    arguments = [oracle.f64(a) for a in (x, weight, history)]
    for which, grad in enumerate(got):
        want = np.zeros(grad.shape)
        for index in np.ndindex(grad.shape):
            ends = []
            for step in (1e-6, -1e-6):
                moved = [a.copy() for a in arguments]
                moved[which][index] += step
                ends.append(reference(moved))
            want[index] = (ends[0] - ends[1]) / 2e-6
        assert_close(grad, want, tolerance(F32).gradient, f"gradient of argument {which}")


# --- speculative windows ---------------------------------------------------------------------------------------------


SLOTS = np.array([3, 0, 6, 1, 4], np.int32)
LENGTHS = np.array([4, 4, 1, 0, 3], np.int32)


def window(seed, dtype=F32, taps=4, layers=()):
    x = rng(seed, 8).normal(size=(*layers, 5, 4, C)).astype(dtype)
    weight = rng(seed, 9).normal(size=(C, taps)).astype(dtype)
    history_pool = pool(seed, (8, taps - 1, C), nan_slots=(0, 5), dtype=dtype)
    return x, weight, history_pool


@DTYPES
def test_step(implementation, dtype):
    x, weight, history_pool = window(1, dtype)
    x = nan_past(x, np.where(SLOTS == 0, 0, LENGTHS))
    y = jitted("conv_step", implementation=implementation)(x, weight, history_pool, SLOTS, LENGTHS)
    assert y.dtype == dtype
    assert_close(y, oracle.conv_step(x, weight, history_pool, SLOTS, LENGTHS), tolerance(dtype).output, "y")
    assert_zero_past(y, np.where(SLOTS == 0, 0, LENGTHS), "y")


def test_step_and_commit_continue_a_prefill(implementation):
    """Prefill 6 rows, then windows of 4 of which n stand: the same as one prefill of the rows that stood."""
    W, accepted = 4, [3, 1, 4, 2]
    x, weight, _ = draw(7, 1, 6 + sum(accepted))
    prefill = jitted("conv_prefill")
    whole, _ = prefill(x, weight)
    _, history = prefill(x[:, :6], weight)
    history_pool = np.full((3, 3, C), np.nan, F32)
    history_pool[2] = history[0]
    slots, lengths, start = np.array([2], np.int32), np.array([W], np.int32), 6
    for n in accepted:
        rows = rng(n).normal(size=(1, W, C)).astype(F32)  # drafts that fall
        rows[:, :n] = x[:, start : start + n]
        y = jitted("conv_step", implementation=implementation)(rows, weight, history_pool, slots, lengths)
        assert_close(y[:, :n], whole[:, start : start + n], tolerance(F32).output, f"rows from {start}")
        plan = plan_of(oracle.plan_commit([n], lengths, slots))
        history_pool = jitted("conv_commit", implementation=implementation)(history_pool, rows, plan)
        start += n
        assert_same_bits(history_pool[2], x[0, start - 3 : start], f"history after {start} rows")


@DTYPES
@pytest.mark.parametrize("taps", [2, 4, 7])
def test_commit(implementation, dtype, taps):
    x, _, history_pool = window(2, dtype, taps)
    history_pool[1] = np.nan
    accepted = np.array([2, 3, 5, 2, 3], np.int32)
    plan = oracle.plan_commit(accepted, LENGTHS, SLOTS)
    x = nan_past(x, plan.commit_length)
    new = jitted("conv_commit", implementation=implementation)(history_pool, x, plan_of(plan))
    written = oracle.conv_commit(history_pool, x, plan)
    assert sorted(written) == [3, 4, 6]
    assert_pool(new, history_pool, written, 0.0)


def test_commit_of_a_boundary(implementation):
    x, _, history_pool = window(3)
    table, computed = np.array([[3, 7, 0], [0, 0, 0], [2, 6, 5], [1, 0, 0], [4, 0, 0]], np.int32), [6, 6, 15, 7, 4]
    plan = oracle.plan_commit([4, 4, 1, 0, 3], LENGTHS, SLOTS, table, computed, 8)
    new = jitted("conv_commit", implementation=implementation)(history_pool, x, plan_of(plan))
    written = oracle.conv_commit(history_pool, x, plan)
    assert sorted(written) == [3, 4, 6, 7]
    assert_pool(new, history_pool, written, 0.0)


def test_commit_of_all_layers(implementation):
    x, _, _ = window(4, layers=(3,))
    pools = np.stack([pool(layer, (8, 3, C), nan_slots=(0, 5)) for layer in range(3)])
    plan = oracle.plan_commit([2, 3, 1, 2, 3], LENGTHS, SLOTS)
    new = jitted("conv_commit", implementation=implementation)(pools, x, plan_of(plan))
    assert new.shape == pools.shape
    for layer in range(3):
        assert_pool(new[layer], pools[layer], oracle.conv_commit(pools[layer], x[layer], plan), 0.0, f"layer {layer}")


# --- refusals --------------------------------------------------------------------------------------------------------


def zeros(*shape, dtype=F32):
    return np.zeros(shape, dtype)


PREFILL = {
    "x rank": (r"\bx\b", {"x": zeros(5, C)}),
    "x integer": (r"\bx\b", {"x": zeros(2, 5, C, dtype=np.int32)}),
    "weight rank": (r"\bweight\b", {"weight": zeros(C, 1, 4)}),
    "weight channels": (r"\bweight\b", {"weight": zeros(C + 1, 4)}),
    "history rows": (r"\bhistory\b", {"history": zeros(2, 4, C)}),
    "history batch": (r"\bhistory\b", {"history": zeros(3, 3, C)}),
    "lengths shape": (r"\blengths\b", {"lengths": zeros(3, dtype=np.int32)}),
    "lengths dtype": (r"\blengths\b", {"lengths": zeros(2)}),
    "implementation": (r"\bimplementation\b.*cuda", {"implementation": "cuda"}),
}
STEP = {
    "x rank": (r"\bx\b", {"x": zeros(5, C)}),
    "weight channels": (r"\bweight\b", {"weight": zeros(C + 1, 4)}),
    "pool rows": (r"\bhistory_pool\b", {"history_pool": zeros(8, 4, C)}),
    "pool channels": (r"\bhistory_pool\b", {"history_pool": zeros(8, 3, C + 1)}),
    "slots shape": (r"\bslots\b", {"slots": zeros(4, dtype=np.int32)}),
    "slots dtype": (r"\bslots\b", {"slots": zeros(5)}),
    "lengths shape": (r"\blengths\b", {"lengths": zeros(6, dtype=np.int32)}),
    "implementation": (r"\bimplementation\b.*cuda", {"implementation": "cuda"}),
}
COMMIT = {
    "pool rank": (r"\bhistory_pool\b", {"history_pool": zeros(8, C)}),
    "x channels": (r"\bx\b", {"x": zeros(5, 4, C + 1)}),
    "x layers": (r"\bx\b", {"x": zeros(2, 5, 4, C)}),
    "plan rows": (r"\bplan\b", {"x": zeros(6, 4, C)}),
    "implementation": (r"\bimplementation\b.*cuda", {"implementation": "cuda"}),
}


@pytest.mark.parametrize("case", PREFILL)
def test_bad_prefill(case):
    match, change = PREFILL[case]
    with pytest.raises(ValueError, match=match):
        ops.conv_prefill(**({"x": zeros(2, 5, C), "weight": zeros(C, 4)} | change))


@pytest.mark.parametrize("case", STEP)
def test_bad_step(case):
    match, change = STEP[case]
    x, weight, history_pool = window(1)
    good = {"x": x, "weight": weight, "history_pool": history_pool, "slots": SLOTS, "lengths": LENGTHS}
    with pytest.raises(ValueError, match=match):
        ops.conv_step(**(good | change))


@pytest.mark.parametrize("case", COMMIT)
def test_bad_commit(case):
    match, change = COMMIT[case]
    x, _, history_pool = window(1)
    plan = plan_of(oracle.plan_commit(LENGTHS, LENGTHS, SLOTS))
    with pytest.raises(ValueError, match=match):
        ops.conv_commit(**({"history_pool": history_pool, "x": x, "plan": plan} | change))
