"""kda_recurrent: the sequential form."""

import jax
import numpy as np
import pytest

from kda_jax import ops
from tests import oracle
from tests.ops.harness import assert_zero_past, jitted
from tests.ops.inputs import BF16, BOUNDED_DECAYS, DECAYS, F32, MORE_DIMS, nan_past, rng, sequence
from tests.tolerances import assert_close, tolerance

OPS = ("kda_recurrent",)


def check_rows(out, ref, dtype, names=DECAYS):
    """Every regime of decay on its own: a strong row can't hide behind a weak one."""
    (o, state), (o_ref, state_ref) = out, ref
    assert o.dtype == dtype
    assert state.dtype == F32
    for b, name in enumerate(names):
        assert_close(o[b], o_ref[b], tolerance(dtype).output, f"o, {name}")
        assert_close(state[b], state_ref[b], tolerance(dtype).state, f"state, {name}")


@pytest.mark.parametrize("T", [1, 2, 17, 65])
def test_values(implementation, T):
    x = sequence(T, T)
    check_rows(jitted("kda_recurrent", implementation=implementation)(**x), oracle.recurrent(**x), F32)


@pytest.mark.parametrize("dims", MORE_DIMS, ids=str)
def test_heads_and_dims(implementation, dims):
    x = sequence(1, 15, dims)
    check_rows(jitted("kda_recurrent", implementation=implementation)(**x), oracle.recurrent(**x), F32)


def test_bf16(implementation):
    x = sequence(2, 65, dtype=BF16)
    check_rows(jitted("kda_recurrent", implementation=implementation)(**x), oracle.recurrent(**x), BF16)


def test_bounded_decays(implementation):
    x = sequence(3, 33, decays=BOUNDED_DECAYS)
    out = jitted("kda_recurrent", implementation=implementation)(**x)
    check_rows(out, oracle.recurrent(**x), F32, BOUNDED_DECAYS)


def test_scale_and_no_initial_state(implementation):
    x = sequence(4, 15)
    del x["initial_state"]
    for scale in (None, 0.7):
        out = jitted("kda_recurrent", scale=scale, implementation=implementation)(**x)
        check_rows(out, oracle.recurrent(**x, scale=scale), F32)


def test_lengths_with_nan_in_the_padding(implementation):
    lengths = np.array([0, 1, 2, 16, 17, 9], np.int32)
    x = sequence(5, 17)
    x = {name: a if name == "initial_state" else nan_past(a, lengths) for name, a in x.items()}
    o, state = jitted("kda_recurrent", implementation=implementation)(**x, lengths=lengths)
    o_ref, state_ref = oracle.recurrent(**x, lengths=lengths)
    check_rows((o, state), (o_ref, state_ref), F32)
    assert_zero_past(o, lengths, "o")
    np.testing.assert_array_equal(state[0], x["initial_state"][0])


def test_gradients(implementation):
    lengths = np.array([0, 1, 2, 16, 17, 9], np.int32)
    x = sequence(6, 17)
    x = {name: a if name == "initial_state" else nan_past(a, lengths) for name, a in x.items()}
    do, ds = rng(1).normal(size=x["v"].shape).astype(F32), rng(2).normal(size=x["initial_state"].shape).astype(F32)

    def loss(x):
        o, state = ops.kda_recurrent(**x, lengths=lengths, implementation=implementation)
        return (o * do).sum() + (state * ds).sum()

    grads = jax.jit(jax.grad(loss))(x)
    for name, want in oracle.recurrent_gradients(do, ds, **x, lengths=lengths).items():
        assert_close(grads[name], want, tolerance(F32).gradient, f"d {name}")
        if name != "initial_state":
            assert_zero_past(grads[name], lengths, f"d {name}")


def _zeros(*shape, dtype=F32):
    return np.zeros(shape, dtype)


# A sequence of B=2, T=5, H=2, HV=4, K=16, V=24. kda_chunked refuses the same.
BAD = {
    "q rank": (r"\bq\b", {"q": _zeros(5, 2, 16)}),
    "q integer": (r"\bq\b", {"q": _zeros(2, 5, 2, 16, dtype=np.int32)}),
    "k shape": (r"\b(q|k)\b", {"k": _zeros(2, 5, 2, 24)}),
    "k rank": (r"\b(q|k)\b", {"k": _zeros(2, 5, 32)}),
    "v rank": (r"\bv\b", {"v": _zeros(2, 5, 96)}),
    "v time": (r"\bv\b", {"v": _zeros(2, 6, 4, 24)}),
    "v heads": (r"\b(v|HV)\b", {"v": _zeros(2, 5, 3, 24), "log_decay": _zeros(2, 5, 3, 16), "beta": _zeros(2, 5, 3)}),
    "log_decay of V": (r"\blog_decay\b", {"log_decay": _zeros(2, 5, 4, 24)}),
    "log_decay heads": (r"\blog_decay\b", {"log_decay": _zeros(2, 5, 2, 16)}),
    "log_decay rank": (r"\blog_decay\b", {"log_decay": _zeros(2, 5, 4)}),
    "beta heads": (r"\bbeta\b", {"beta": _zeros(2, 5, 2)}),
    "beta rank": (r"\bbeta\b", {"beta": _zeros(2, 5, 4, 1)}),
    "state key first": (r"\binitial_state\b", {"initial_state": _zeros(2, 4, 16, 24)}),
    "state batch": (r"\binitial_state\b", {"initial_state": _zeros(1, 4, 24, 16)}),
    "lengths shape": (r"\blengths\b", {"lengths": _zeros(3, dtype=np.int32)}),
    "lengths rank": (r"\blengths\b", {"lengths": _zeros(2, 1, dtype=np.int32)}),
    "lengths dtype": (r"\blengths\b", {"lengths": _zeros(2)}),
    "implementation": (r"\bimplementation\b.*cuda", {"implementation": "cuda"}),
}


def good_sequence():
    return {
        "q": _zeros(2, 5, 2, 16),
        "k": _zeros(2, 5, 2, 16),
        "v": _zeros(2, 5, 4, 24),
        "log_decay": _zeros(2, 5, 4, 16),
        "beta": _zeros(2, 5, 4),
    }


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    match, change = BAD[case]
    with pytest.raises(ValueError, match=match):
        ops.kda_recurrent(**(good_sequence() | change))
