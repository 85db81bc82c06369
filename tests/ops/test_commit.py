"""kda_commit: records folded into the pool, against decoding the accepted tokens again."""

import numpy as np
import pytest

from kda_jax import ops
from tests import oracle
from tests.ops.harness import assert_pool, jitted, plan_of, records_of
from tests.ops.inputs import BF16, DIMS, F32, MORE_DIMS, gate, nan_past, rng, states, tokens
from tests.ops.test_decode import bounded_or_not
from tests.tolerances import BF16_POOL, tolerance

OPS = ("kda_commit",)
W, N = 5, 12
SLOTS = np.array([3, 0, 6, 1, 8, 4, 9], np.int32)
LENGTHS = np.array([5, 5, 1, 0, 4, 5, 5], np.int32)
ACCEPTED = np.array([5, 3, 2, 1, 0, 4, 1], np.int32)  # written: 3, 6, 4, 9


def draw(seed, dims=DIMS, dtype=F32, lower_bound=None, window=W, lengths=LENGTHS):
    """Tokens, gate, pool and the oracle's records of them."""
    g = gate(seed, dims, lower_bound)
    x = tokens(seed, len(SLOTS), window, dims, dtype, g, bounded_or_not(lower_bound))
    pool = states(seed, N, dims, nan_slots=(0, 5, 11))
    return x, g, pool, oracle.verify(*x, g, pool, SLOTS, lengths)[1]


def commit(implementation, pool, records, g, plan):
    run = jitted("kda_commit", implementation=implementation)
    return run(pool, records_of(records), g.params(ops), plan_of(plan))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_values(implementation, dtype, lower_bound):
    x, g, pool, records = draw(1, dtype=dtype, lower_bound=lower_bound)
    plan = oracle.plan_commit(ACCEPTED, LENGTHS, SLOTS)
    written = oracle.commit(pool, *x, g, plan)
    assert sorted(written) == [3, 4, 6, 9]
    assert_pool(commit(implementation, pool, records, g, plan), pool, written, tolerance(dtype).state)


@pytest.mark.parametrize("dims", MORE_DIMS, ids=str)
def test_heads_and_dims(implementation, dims):
    x, g, pool, records = draw(2, dims)
    plan = oracle.plan_commit(ACCEPTED, LENGTHS, SLOTS)
    written = oracle.commit(pool, *x, g, plan)
    assert_pool(commit(implementation, pool, records, g, plan), pool, written, tolerance(F32).state)


@pytest.mark.parametrize("n", [1, 7, 20])
def test_long_window_of_every_decay(implementation, n):
    lengths = np.full(len(SLOTS), 20, np.int32)
    x, g, pool, records = draw(3, window=20, lengths=lengths)
    plan = oracle.plan_commit(np.full(len(SLOTS), n), lengths, SLOTS)
    written = oracle.commit(pool, *x, g, plan)
    assert_pool(commit(implementation, pool, records, g, plan), pool, written, tolerance(F32).state)


def test_any_records(implementation):
    """Records needn't come from a verify: commit is the fold of what it is given."""
    _, g, pool, records = draw(4)
    records = records._replace(correction=rng(4).normal(size=records.correction.shape))
    plan = oracle.plan_commit(ACCEPTED, LENGTHS, SLOTS)
    new = commit(implementation, pool, records, g, plan)
    assert_pool(new, pool, oracle.fold(pool, records, g, plan), tolerance(F32).state)


def test_rejected_rows_may_hold_nan(implementation):
    x, g, pool, records = draw(5)
    plan = oracle.plan_commit(ACCEPTED, LENGTHS, SLOTS)

    def spoil(a):
        return np.moveaxis(nan_past(np.moveaxis(a, 2, 1), plan.commit_length), 1, 2)

    spoilt = oracle.Records(*map(spoil, records))
    written = oracle.commit(pool, *x, g, plan)
    assert_pool(commit(implementation, pool, spoilt, g, plan), pool, written, tolerance(F32).state)


def test_nothing_accepted_writes_nothing(implementation):
    _, g, pool, records = draw(6)
    plan = oracle.plan_commit(np.zeros_like(ACCEPTED), LENGTHS, SLOTS)
    assert_pool(commit(implementation, pool, records, g, plan), pool, {}, 0.0)


# Blocks of 8 tokens. Rows: crosses; null; lands on a boundary; zero length; stays; crosses into column 2; stays.
TABLE = np.array(
    [[3, 10, 0], [0, 0, 0], [2, 6, 0], [1, 0, 0], [8, 0, 0], [2, 4, 7], [9, 0, 0]],
    np.int32,
)
COMPUTED = np.array([6, 3, 15, 7, 2, 15, 1], np.int32)
ALIGN_ACCEPTED = np.array([5, 3, 1, 1, 3, 4, 2], np.int32)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_align(implementation, dtype):
    x, g, pool, records = draw(7, dtype=dtype)
    pool[[7, 10]] = np.nan  # what a fresh column holds is not read
    plan = oracle.plan_commit(ALIGN_ACCEPTED, LENGTHS, SLOTS, TABLE, COMPUTED, 8)
    np.testing.assert_array_equal(plan.boundary_slot, [3, 0, 6, 0, 0, 4, 0])
    np.testing.assert_array_equal(plan.boundary_length, [2, 0, 1, 0, 0, 1, 0])
    np.testing.assert_array_equal(plan.final_slot, [10, 0, 6, 0, 8, 7, 9])
    written = oracle.commit(pool, *x, g, plan)
    # the boundary state is the state after boundary_length tokens
    for slot, n in ((3, 2), (4, 1)):
        shorter = oracle.plan_commit([n] * len(SLOTS), LENGTHS, SLOTS)
        np.testing.assert_array_equal(written[slot], oracle.commit(pool, *x, g, shorter)[slot])
    assert_pool(commit(implementation, pool, records, g, plan), pool, written, tolerance(dtype).state)


def test_final_slot_elsewhere_leaves_the_source(implementation):
    x, g, pool, records = draw(8)
    plan = oracle.plan_commit(ACCEPTED, LENGTHS, SLOTS)
    plan = plan._replace(final_slot=np.where(plan.final_slot == 3, 10, plan.final_slot).astype(np.int32))
    written = oracle.commit(pool, *x, g, plan)
    assert sorted(written) == [4, 6, 9, 10]  # 3 isn't: assert_pool holds it to its old bits
    assert_pool(commit(implementation, pool, records, g, plan), pool, written, tolerance(F32).state)


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_all_layers_at_once(implementation, align, lower_bound):
    layers = [draw(20 + layer, lower_bound=lower_bound) for layer in range(3)]
    if align:
        plan = oracle.plan_commit(ALIGN_ACCEPTED, LENGTHS, SLOTS, TABLE, COMPUTED, 8)
    else:
        plan = oracle.plan_commit(ACCEPTED, LENGTHS, SLOTS)
    pools = np.stack([pool for _, _, pool, _ in layers])
    records = oracle.Records(*map(np.stack, zip(*(r for *_, r in layers), strict=True)))
    g = layers[0][1]._replace(
        A_log=np.stack([g.A_log for _, g, _, _ in layers]), dt_bias=np.stack([g.dt_bias for _, g, _, _ in layers])
    )
    new = commit(implementation, pools, records, g, plan)
    assert new.shape == pools.shape
    for layer, (x, g_layer, pool, _) in enumerate(layers):
        written = oracle.commit(pool, *x, g_layer, plan)
        assert_pool(new[layer], pool, written, tolerance(F32).state, f"layer {layer}")


def test_bf16_pool(implementation):
    x, g, pool, _ = draw(9)
    pool = states(9, N, nan_slots=(0, 5), dtype=BF16)
    records = oracle.verify(*x, g, pool, SLOTS, LENGTHS)[1]
    plan = oracle.plan_commit(ACCEPTED, LENGTHS, SLOTS)
    written = oracle.commit(pool, *x, g, plan)
    assert_pool(commit(implementation, pool, records, g, plan), pool, written, BF16_POOL)


def _zeros(*shape, dtype=F32):
    return np.zeros(shape, dtype)


BAD = {
    "pool key first": (r"\bstate_pool\b", {"state_pool": _zeros(12, 4, 16, 24)}),
    "pool rank": (r"\bstate_pool\b", {"state_pool": _zeros(4, 24, 16)}),
    "pool integer": (r"\bstate_pool\b", {"state_pool": _zeros(12, 4, 24, 16, dtype=np.int32)}),
    "correction rank": (r"\bcorrection\b", {"correction": _zeros(7, 4, 24)}),
    "correction bf16": (r"\bcorrection\b", {"correction": _zeros(7, 4, 5, 24, dtype=BF16)}),
    "key window": (r"\bkey\b", {"key": _zeros(7, 2, 4, 16)}),
    "key heads": (r"\bkey\b", {"key": _zeros(7, 3, 5, 16)}),
    "raw_gate heads": (r"\braw_gate\b", {"raw_gate": _zeros(7, 2, 5, 16)}),
    "plan rows": (r"\bplan\b", {"plan": oracle.plan_commit([1] * 6, [1] * 6, [1] * 6)}),
    "dt_bias dims": (r"\bdt_bias\b", {"gate": gate(1)._replace(dt_bias=_zeros(4, 24))}),
    "layers of the gate": (r"\b(A_log|dt_bias)\b", {"gate": gate(1, layers=(3,))}),
    "implementation": (r"\bimplementation\b.*cuda", {"implementation": "cuda"}),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    match, change = BAD[case]
    change = dict(change)
    _, g, pool, records = draw(1)
    parts = {name: change.pop(name, a) for name, a in records_of(records).__dict__.items()}
    plan = plan_of(change.pop("plan", oracle.plan_commit(ACCEPTED, LENGTHS, SLOTS)))
    g = change.pop("gate", g)
    with pytest.raises(ValueError, match=match):
        ops.kda_commit(
            **({"state_pool": pool, "plan": plan} | change), records=ops.Records(**parts), gate=g.params(ops)
        )
