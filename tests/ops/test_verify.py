"""kda_verify: outputs and records of a window; the pool is only read."""

import numpy as np
import pytest

from kda_jax import ops
from tests import oracle
from tests.ops.harness import assert_same_bits, assert_zero_past, jitted
from tests.ops.inputs import BF16, DECAYS, DIMS, F32, MORE_DIMS, gate, nan_past, states, tokens
from tests.ops.test_decode import bounded_or_not
from tests.tolerances import assert_close, tolerance

OPS = ("kda_verify",)
SLOTS = np.array([3, 0, 6, 1, 7, 4, 2], np.int32)
N = 9


def draw(seed, W, lengths, dims=DIMS, dtype=F32, lower_bound=None):
    """Arguments of kda_verify up to the gate, NaN at and past the length (null rows: 0)."""
    g = gate(seed, dims, lower_bound)
    x = tokens(seed, len(SLOTS), W, dims, dtype, g, bounded_or_not(lower_bound))
    return [nan_past(a, np.where(SLOTS == 0, 0, lengths)) for a in x], g


def check(out, x, g, pool, slots, lengths, dtype):
    (o, records), (o_ref, want) = out, oracle.verify(*x, g, pool, slots, lengths)
    assert o.dtype == dtype
    assert records.correction.dtype == F32
    live = np.where(slots == 0, 0, lengths)
    assert_zero_past(o, live, "o")
    assert_zero_past(np.moveaxis(records.correction, 2, 1), live, "correction")
    for r in np.flatnonzero(live):
        assert_close(o[r], o_ref[r], tolerance(dtype).output, f"o, row {r}")
        assert_close(records.correction[r], want.correction[r], tolerance(dtype).state, f"correction, row {r}")
    assert_same_bits(records.key, want.key, "key record")
    assert_same_bits(records.raw_gate, want.raw_gate, "raw gate record")


@pytest.mark.parametrize("W", [1, 2, 3, 5, 8])
def test_values(implementation, W):
    lengths = np.minimum(np.array([W, W, 1, 0, W, 2, W - 1]), W).astype(np.int32)
    x, g = draw(W, W, lengths)
    pool = states(1, N, nan_slots=(0, 5, 8))
    before = pool.copy()
    out = jitted("kda_verify", implementation=implementation)(*x, g.params(ops), pool, SLOTS, lengths)
    check(out, x, g, pool, SLOTS, lengths, F32)
    assert_same_bits(pool, before, "the pool is only read")


LENGTHS = np.array([5, 5, 1, 0, 4, 2, 3], np.int32)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_dtypes_and_gates(implementation, dtype, lower_bound):
    x, g = draw(1, 5, LENGTHS, dtype=dtype, lower_bound=lower_bound)
    pool = states(1, N)
    out = jitted("kda_verify", implementation=implementation)(*x, g.params(ops), pool, SLOTS, LENGTHS)
    check(out, x, g, pool, SLOTS, LENGTHS, dtype)


@pytest.mark.parametrize("dims", MORE_DIMS, ids=str)
def test_heads_and_dims(implementation, dims):
    x, g = draw(2, 5, LENGTHS, dims)
    pool = states(2, N, dims)
    out = jitted("kda_verify", implementation=implementation)(*x, g.params(ops), pool, SLOTS, LENGTHS)
    check(out, x, g, pool, SLOTS, LENGTHS, F32)


def test_long_window_of_every_decay(implementation):
    lengths = np.full(len(SLOTS), 20, np.int32)
    x, g = draw(3, 20, lengths)
    assert len(SLOTS) > len(DECAYS)  # every regime has a row
    pool = states(3, N)
    out = jitted("kda_verify", implementation=implementation)(*x, g.params(ops), pool, SLOTS, lengths)
    check(out, x, g, pool, SLOTS, lengths, F32)


def test_all_rows_null(implementation):
    x, g = draw(4, 5, np.zeros_like(LENGTHS))
    pool, slots = states(4, N, nan_slots=range(N)), np.zeros_like(SLOTS)
    out = jitted("kda_verify", implementation=implementation)(*x, g.params(ops), pool, slots, LENGTHS)
    check(out, x, g, pool, slots, LENGTHS, F32)


def test_bf16_pool(implementation):
    """A bf16 pool is read exactly: corrections and outputs keep the fp32 tolerance."""
    x, g = draw(5, 5, LENGTHS)
    pool = states(5, N, dtype=BF16)
    out = jitted("kda_verify", implementation=implementation)(*x, g.params(ops), pool, SLOTS, LENGTHS)
    check(out, x, g, pool, SLOTS, LENGTHS, F32)


def _zeros(*shape, dtype=F32):
    return np.zeros(shape, dtype)


BAD = {
    "q rank": (r"\bq\b", {"q": _zeros(7, 2, 16)}),
    "q integer": (r"\bq\b", {"q": _zeros(7, 5, 2, 16, dtype=np.int32)}),
    "k window": (r"\b(q|k)\b", {"k": _zeros(7, 4, 2, 16)}),
    "v window": (r"\bv\b", {"v": _zeros(7, 4, 4, 24)}),
    "v heads": (
        r"\b(v|HV)\b",
        {
            "v": _zeros(7, 5, 3, 24),
            "raw_gate": _zeros(7, 5, 3, 16),
            "raw_beta": _zeros(7, 5, 3),
            "state_pool": _zeros(9, 3, 24, 16),
        },
    ),
    "raw_gate of V": (r"\braw_gate\b", {"raw_gate": _zeros(7, 5, 4, 24)}),
    "raw_beta rank": (r"\braw_beta\b", {"raw_beta": _zeros(7, 5, 4, 1)}),
    "pool key first": (r"\bstate_pool\b", {"state_pool": _zeros(9, 4, 16, 24)}),
    "slots rows": (r"\bslots\b", {"slots": _zeros(6, dtype=np.int32)}),
    "slots dtype": (r"\bslots\b", {"slots": _zeros(7)}),
    "lengths rows": (r"\blengths\b", {"lengths": _zeros(6, dtype=np.int32)}),
    "lengths dtype": (r"\blengths\b", {"lengths": _zeros(7)}),
    "dt_bias dims": (r"\bdt_bias\b", {"gate": gate(1)._replace(dt_bias=_zeros(4, 24))}),
    "implementation": (r"\bimplementation\b.*cuda", {"implementation": "cuda"}),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    match, change = BAD[case]
    x, g = draw(1, 5, LENGTHS)
    names = ("q", "k", "v", "raw_gate", "raw_beta")
    rest = {"gate": g, "state_pool": states(1, N), "slots": SLOTS, "lengths": LENGTHS}
    arguments = dict(zip(names, x, strict=True)) | rest | change
    with pytest.raises(ValueError, match=match):
        ops.kda_verify(**(arguments | {"gate": arguments["gate"].params(ops)}))
