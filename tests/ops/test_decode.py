"""kda_decode: one token for each row, on a pool of states."""

import numpy as np
import pytest

from kda_jax import ops
from tests import oracle
from tests.ops.harness import assert_pool, jitted
from tests.ops.inputs import BF16, DECAYS, DIMS, F32, MORE_DIMS, gate, states, tokens
from tests.tolerances import BF16_POOL, assert_close, tolerance

OPS = ("kda_decode",)
SLOTS = np.array([3, 0, 6, 1, 8, 4, 0], np.int32)  # slots 2, 5 and 7 are nobody's
N = 9


def draw(seed, dims=DIMS, dtype=F32, lower_bound=None):
    """The arguments of kda_decode without pool and slots; null rows hold NaN."""
    g = gate(seed, dims, lower_bound)
    one = [x[:, 0].copy() for x in tokens(seed, len(SLOTS), 1, dims, dtype, g, bounded_or_not(lower_bound))]
    for x in one:
        x[SLOTS == 0] = np.nan
    return one, g


def bounded_or_not(lower_bound):
    return DECAYS if lower_bound is None else {"any": lambda r, shape: -r.uniform(0.001, 0.999, shape) * -lower_bound}


def check(out, one, g, pool, slots, dtype, pool_limit=None):
    (o, new), (o_ref, pool_ref) = out, oracle.decode(*one, g, pool, slots)
    assert o.dtype == dtype
    for r, slot in enumerate(slots):
        if slot == 0:
            assert not np.asarray(o[r]).any(), f"null row {r} is not zero"
        else:
            assert_close(o[r], o_ref[r], tolerance(dtype).output, f"o, row {r}")
    assert_pool(new, pool, {s: pool_ref[s] for s in slots if s != 0}, pool_limit or tolerance(dtype).state)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_values(implementation, dtype, lower_bound):
    one, g = draw(1, dtype=dtype, lower_bound=lower_bound)
    pool = states(1, N, nan_slots=(0, 5))
    out = jitted("kda_decode", implementation=implementation)(*one, g.params(ops), pool, SLOTS)
    check(out, one, g, pool, SLOTS, dtype)


@pytest.mark.parametrize("dims", MORE_DIMS, ids=str)
def test_heads_and_dims(implementation, dims):
    one, g = draw(2, dims)
    pool = states(2, N, dims)
    out = jitted("kda_decode", implementation=implementation)(*one, g.params(ops), pool, SLOTS)
    check(out, one, g, pool, SLOTS, F32)


def test_without_A_log(implementation):
    one, g = draw(3)
    g = g._replace(A_log=None)
    pool = states(3, N)
    out = jitted("kda_decode", implementation=implementation)(*one, g.params(ops), pool, SLOTS)
    check(out, one, g, pool, SLOTS, F32)


def test_all_rows_null(implementation):
    one, g = draw(4)
    pool, slots = states(4, N, nan_slots=range(N)), np.zeros_like(SLOTS)
    out = jitted("kda_decode", implementation=implementation)(*one, g.params(ops), pool, slots)
    check(out, one, g, pool, slots, F32)


def test_bf16_pool(implementation):
    one, g = draw(5)
    pool = states(5, N, dtype=BF16)
    out = jitted("kda_decode", implementation=implementation)(*one, g.params(ops), pool, SLOTS)
    check(out, one, g, pool, SLOTS, F32, BF16_POOL)


def test_tiny_queries_and_keys(implementation):
    """The eps of the L2 norm is on the sum: it matters where |k| is about 1e-3."""
    one, g = draw(6)
    one[0], one[1] = one[0] * F32.type(1e-4), one[1] * F32.type(1e-3)
    pool = states(6, N)
    out = jitted("kda_decode", implementation=implementation)(*one, g.params(ops), pool, SLOTS)
    check(out, one, g, pool, SLOTS, F32)


def test_token_by_token_equals_the_recurrent_form(implementation):
    """A pool driven for 40 tokens, in fp32, ends where the recurrence over the sequence ends."""
    g, T = gate(7), 40
    q, k, v, raw_gate, raw_beta = tokens(7, len(SLOTS), T, g=g)
    pool = states(7, N)
    o_ref, state_ref = oracle.recurrent(
        oracle.l2_normalize(q),
        oracle.l2_normalize(k),
        v,
        oracle.gate(raw_gate, g.A_log, g.dt_bias),
        oracle.sigmoid(raw_beta),
        np.where(SLOTS[:, None, None, None] == 0, 0, pool[SLOTS]),
    )
    run, new = jitted("kda_decode", implementation=implementation), pool
    live = SLOTS != 0
    for t in range(T):
        o, new = run(q[:, t], k[:, t], v[:, t], raw_gate[:, t], raw_beta[:, t], g.params(ops), new, SLOTS)
        assert_close(np.asarray(o)[live], o_ref[live, t], tolerance(F32).output, f"o, token {t}")
    assert_pool(new, pool, {s: state_ref[r] for r, s in enumerate(SLOTS) if s != 0}, tolerance(F32).state)


def _zeros(*shape, dtype=F32):
    return np.zeros(shape, dtype)


BAD = {
    "q rank": (r"\bq\b", {"q": _zeros(7, 1, 2, 16)}),
    "q integer": (r"\bq\b", {"q": _zeros(7, 2, 16, dtype=np.int32)}),
    "k shape": (r"\b(q|k)\b", {"k": _zeros(7, 2, 24)}),
    "v rows": (r"\bv\b", {"v": _zeros(6, 4, 24)}),
    "v heads": (
        r"\b(v|HV)\b",
        {
            "v": _zeros(7, 3, 24),
            "raw_gate": _zeros(7, 3, 16),
            "raw_beta": _zeros(7, 3),
            "state_pool": _zeros(9, 3, 24, 16),
        },
    ),
    "raw_gate of V": (r"\braw_gate\b", {"raw_gate": _zeros(7, 4, 24)}),
    "raw_beta heads": (r"\braw_beta\b", {"raw_beta": _zeros(7, 2)}),
    "pool key first": (r"\bstate_pool\b", {"state_pool": _zeros(9, 4, 16, 24)}),
    "pool rank": (r"\bstate_pool\b", {"state_pool": _zeros(4, 24, 16)}),
    "pool integer": (r"\bstate_pool\b", {"state_pool": _zeros(9, 4, 24, 16, dtype=np.int32)}),
    "slots rows": (r"\bslots\b", {"slots": _zeros(6, dtype=np.int32)}),
    "slots dtype": (r"\bslots\b", {"slots": _zeros(7)}),
    "A_log heads": (r"\bA_log\b", {"gate": gate(1, DIMS._replace(HV=2))._replace(dt_bias=_zeros(4, 16))}),
    "dt_bias dims": (r"\bdt_bias\b", {"gate": gate(1)._replace(dt_bias=_zeros(4, 24))}),
    "implementation": (r"\bimplementation\b.*cuda", {"implementation": "cuda"}),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    match, change = BAD[case]
    one, g = draw(1)
    names = ("q", "k", "v", "raw_gate", "raw_beta")
    arguments = dict(zip(names, one, strict=True)) | {"gate": g, "state_pool": states(1, N), "slots": SLOTS} | change
    with pytest.raises(ValueError, match=match):
        ops.kda_decode(**(arguments | {"gate": arguments["gate"].params(ops)}))
