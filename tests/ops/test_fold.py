"""kda_verify_after_commit and conv_step_after_commit: a commit folded into the step that follows it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kda_jax import ops
from tests import oracle
from tests.ops.harness import assert_pool, assert_same_bits, assert_zero_past, calls, jitted, plan_of, records_of
from tests.ops.inputs import BF16, DIMS, F32, MORE_DIMS, Dims, gate, nan_past, pool, rng, states, tokens
from tests.ops.test_decode import bounded_or_not
from tests.tolerances import BF16_POOL, assert_close, tolerance

OPS = ("kda_verify_after_commit",)
W, N = 5, 12
# Rows: all of it; null; nothing pending; only commits; pending on a slot no verify reads; nothing at all; the rest.
SLOTS = np.array([3, 0, 6, 1, 0, 0, 4, 9], np.int32)
LENGTHS = np.array([5, 5, 3, 0, 2, 0, 2, 5], np.int32)
OLD_SLOTS = np.array([3, 0, 6, 1, 8, 0, 4, 9], np.int32)
OLD_LENGTHS = np.array([4, 5, 5, 5, 5, 0, 5, 3], np.int32)
ACCEPTED = np.array([2, 3, 0, 5, 1, 0, 4, 3], np.int32)


def draw(seed, dims=DIMS, dtype=F32, lower_bound=None, window=W):
    g = gate(seed, dims, lower_bound)
    decays = bounded_or_not(lower_bound)
    new = [nan_past(a, np.where(SLOTS == 0, 0, LENGTHS)) for a in tokens(seed, len(SLOTS), W, dims, dtype, g, decays)]
    return new, tokens(seed + 1000, len(SLOTS), window, dims, dtype, g, decays), g


def spoilt(records, plan):
    """The records with NaN where a commit may not look."""

    def spoil(a):
        return np.moveaxis(nan_past(np.moveaxis(a, 2, 1), plan.commit_length), 1, 2)

    return oracle.Records(*map(spoil, records))


def check(implementation, new, old, g, state_pool, dtype=F32, pool_limit=None):
    before = state_pool.copy()
    lengths = np.minimum(OLD_LENGTHS, old[0].shape[1])
    plan = oracle.plan_commit(ACCEPTED, lengths, OLD_SLOTS)
    records = spoilt(oracle.verify(*old, g, state_pool, OLD_SLOTS, lengths)[1], plan)
    run = jitted("kda_verify_after_commit", implementation=implementation)
    static = {"writes_boundaries": False}
    o, found, after = run(*new, g.params(ops), state_pool, SLOTS, LENGTHS, records_of(records), plan_of(plan, **static))
    written = oracle.commit(state_pool, *old, g, plan)
    assert len(written) == (plan.commit_length > 0).sum()
    assert_pool(after, state_pool, written, pool_limit or tolerance(dtype).state)
    assert_same_bits(state_pool, before, "the pool that was given")
    committed = oracle.f64(state_pool).copy()
    for slot, state in written.items():
        committed[slot] = np.asarray(after)[slot] if pool_limit else state  # as a verify would read it
    o_ref, want = oracle.verify(*new, g, committed, SLOTS, LENGTHS)
    live = np.where(SLOTS == 0, 0, LENGTHS)
    assert o.dtype == dtype
    assert found.correction.dtype == F32
    assert_zero_past(o, live, "o")
    assert_zero_past(np.moveaxis(found.correction, 2, 1), live, "correction")
    for r in np.flatnonzero(live):
        assert_close(o[r], o_ref[r], tolerance(dtype).output, f"o, row {r}")
        assert_close(found.correction[r], want.correction[r], tolerance(dtype).state, f"correction, row {r}")
    assert_same_bits(found.key, want.key, "key record")
    assert_same_bits(found.raw_gate, want.raw_gate, "raw gate record")


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_values(implementation, dtype, lower_bound):
    check(implementation, *draw(1, dtype=dtype, lower_bound=lower_bound), states(1, N, nan_slots=(0, 2, 5)), dtype)


@pytest.mark.parametrize("dims", MORE_DIMS, ids=str)
def test_heads_and_dims(implementation, dims):
    check(implementation, *draw(2, dims), states(2, N, dims))


@pytest.mark.parametrize("dims", [Dims(1, 2, 96, 80), Dims(1, 1, 240, 256)], ids=str)
def test_large_dims(implementation, dims):
    """Up to 256, not a power of two, in groups and alone."""
    check(implementation, *draw(7, dims, BF16), states(7, N, dims), BF16)


@pytest.mark.parametrize("window", [1, 3, 8])
def test_the_step_before_had_another_window(implementation, window):
    check(implementation, *draw(3, window=window), states(3, N))


def test_bf16_pool(implementation):
    """Verify reads the state as the commit rounded it."""
    check(implementation, *draw(4), states(4, N, dtype=BF16), F32, BF16_POOL)


def test_without_A_log(implementation):
    new, old, g = draw(5)
    check(implementation, new, old, g._replace(A_log=None), states(5, N))


def test_nothing_pending_is_verify(implementation):
    """Nothing is written, and the outputs are those of a verify, to the bit."""
    new, old, g = draw(6)
    state_pool = states(6, N)
    empty = oracle.plan_commit(np.zeros_like(ACCEPTED), OLD_LENGTHS, OLD_SLOTS)
    records = spoilt(oracle.verify(*old, g, state_pool, OLD_SLOTS, OLD_LENGTHS)[1], empty)
    run = jitted("kda_verify_after_commit", implementation=implementation)
    plan = plan_of(empty, writes_boundaries=False)
    o, found, after = run(*new, g.params(ops), state_pool, SLOTS, LENGTHS, records_of(records), plan)
    assert_same_bits(after, state_pool, "pool")
    o_ref, want = jitted("kda_verify", implementation=implementation)(*new, g.params(ops), state_pool, SLOTS, LENGTHS)
    assert_same_bits(o, o_ref, "o")
    assert_same_bits(found.correction, want.correction, "correction")


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**16),
    rows=st.permutations(range(1, N)),
    accepted=st.lists(st.integers(-1, W + 2), min_size=4, max_size=4),
    lengths=st.lists(st.integers(0, W), min_size=8, max_size=8),
    live=st.lists(st.booleans(), min_size=4, max_size=4),
)
@calls("kda_verify_after_commit", "kda_verify", "kda_commit")
def test_folded_is_separate(implementation, seed, rows, accepted, lengths, live):
    """For any acceptance, lengths and null rows: the same outputs, records and pool as a commit and then a verify."""
    g = gate(seed)
    slots = np.where(live, rows[:4], 0).astype(np.int32)
    old_lengths, new_lengths = np.array(lengths, np.int32).reshape(2, 4)
    old, new = tokens(seed, 4, W, g=g), tokens(seed + 1, 4, W, g=g)
    state_pool = states(seed, N, nan_slots=(0, *rows[4:]))
    params = g.params(ops)
    verify = jitted("kda_verify", implementation=implementation)
    _, records = verify(*old, params, state_pool, slots, old_lengths)
    plan = jitted("plan_commit")(np.array(accepted, np.int32), old_lengths, slots)
    assert not plan.writes_boundaries
    committed = jitted("kda_commit", implementation=implementation)(state_pool, records, params, plan)
    o_ref, want = verify(*new, params, committed, slots, new_lengths)
    run = jitted("kda_verify_after_commit", implementation=implementation)
    o, found, after = run(*new, params, state_pool, slots, new_lengths, records, plan)
    changed = slots[np.asarray(plan.commit_length) > 0]
    assert_pool(after, state_pool, {s: np.asarray(committed)[s] for s in changed}, tolerance(F32).state)
    if np.asarray(o_ref).any():
        assert_close(o, o_ref, tolerance(F32).output, "o")
        assert_close(found.correction, want.correction, tolerance(F32).state, "correction")
    assert_same_bits(found.key, want.key, "key record")


# --- the convolution -------------------------------------------------------------------------------------------------

C = 10


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(("taps", "window"), [(2, W), (4, W), (4, 2), (7, W)])
@calls("conv_step_after_commit")
def test_convolution(implementation, dtype, taps, window):
    r = rng(taps, window)
    old, x = r.normal(size=(8, window, C)).astype(dtype), r.normal(size=(8, W, C)).astype(dtype)
    weight = r.normal(size=(C, taps)).astype(dtype)
    history_pool = pool(taps, (N, taps - 1, C), nan_slots=(0, 5), dtype=dtype)
    plan = oracle.plan_commit(ACCEPTED, np.minimum(OLD_LENGTHS, window), OLD_SLOTS)
    old = nan_past(old, plan.commit_length)
    live = np.where(SLOTS == 0, 0, LENGTHS)
    run = jitted("conv_step_after_commit", implementation=implementation)
    y, after = run(nan_past(x, live), weight, history_pool, SLOTS, LENGTHS, old, plan_of(plan, writes_boundaries=False))
    written = oracle.conv_commit(history_pool, old, plan)
    assert_pool(after, history_pool, written, 0.0)
    committed = history_pool.copy()
    for slot, history in written.items():
        committed[slot] = history
    assert y.dtype == dtype
    assert_zero_past(y, live, "y")
    assert_close(y, oracle.conv_step(x, weight, committed, SLOTS, LENGTHS), tolerance(dtype).output, "y")


# --- refusals --------------------------------------------------------------------------------------------------------


def _zeros(*shape, dtype=F32):
    return np.zeros(shape, dtype)


R, H, HV, K, V = 8, *DIMS
BAD = {
    "boundaries": (r"\bplan\.writes_boundaries\b", {"plan": {}}),
    "correction dtype": (r"\bpending\.correction\b", {"correction": _zeros(R, HV, W, V, dtype=BF16)}),
    "correction rows": (r"\bpending\.correction\b", {"correction": _zeros(7, HV, W, V)}),
    "key window": (r"\bpending\.key\b", {"key": _zeros(R, H, 4, K)}),
    "gate heads": (r"\bpending\.raw_gate\b", {"raw_gate": _zeros(R, H, W, K)}),
    "lengths dtype": (r"\blengths\b", {"lengths": _zeros(R)}),
    "implementation": (r"\bimplementation\b.*cuda", {"implementation": "cuda"}),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    match, change = BAD[case]
    new, _, g = draw(1)
    records = {"correction": _zeros(R, HV, W, V), "key": _zeros(R, H, W, K), "raw_gate": _zeros(R, HV, W, K)}
    pending = ops.Records(**{name: change.get(name, x) for name, x in records.items()})
    static = change.get("plan", {"writes_boundaries": False})
    plan = plan_of(oracle.plan_commit(ACCEPTED, OLD_LENGTHS, OLD_SLOTS), **static)
    with pytest.raises(ValueError, match=match):
        ops.kda_verify_after_commit(
            *new, g.params(ops), states(1, N), SLOTS, change.get("lengths", LENGTHS), pending, plan,
            implementation=change.get("implementation"),
        )  # fmt: skip


def test_bad_convolution():
    plan = plan_of(oracle.plan_commit(ACCEPTED, OLD_LENGTHS, OLD_SLOTS))
    arguments = _zeros(R, W, C), _zeros(C, 4), _zeros(N, 3, C), SLOTS, LENGTHS
    with pytest.raises(ValueError, match=r"\bplan\.writes_boundaries\b"):
        ops.conv_step_after_commit(*arguments, _zeros(R, W, C), plan)
    with pytest.raises(ValueError, match=r"\bpending_x\b"):
        ops.conv_step_after_commit(*arguments, _zeros(R, W, C + 1), plan)
