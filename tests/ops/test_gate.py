"""kda_gate, l2_normalize and GateParams."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kda_jax import ops
from tests import oracle
from tests.ops.harness import jitted
from tests.ops.inputs import BF16, DIMS, F32, gate, rng
from tests.tolerances import GATE_ELEMENT

OPS = ("kda_gate",)
BOUNDS = pytest.mark.parametrize("lower_bound", [None, -5.0, -1.5])


def elementwise(x, ref):
    x = np.asarray(x)
    assert x.dtype == F32
    np.testing.assert_allclose(x.astype(np.float64), ref, rtol=GATE_ELEMENT, atol=0)


@BOUNDS
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("lead", [(3, 5), (7,), ()], ids=str)
def test_values(implementation, lower_bound, dtype, lead):
    g = gate(1, DIMS, lower_bound)
    raw = rng(1).uniform(-9, 9, (*lead, DIMS.HV, DIMS.K)).astype(dtype)
    out = jitted("kda_gate", lower_bound=lower_bound, implementation=implementation)(raw, g.A_log, g.dt_bias)
    elementwise(out, oracle.gate(raw, g.A_log, g.dt_bias, lower_bound))
    assert (np.asarray(out) <= 0).all()


@BOUNDS
def test_without_A_log_a_is_one(implementation, lower_bound):
    g = gate(2, DIMS, lower_bound)
    raw = rng(2).uniform(-9, 9, (5, DIMS.HV, DIMS.K)).astype(F32)
    out = ops.kda_gate(raw, None, g.dt_bias, lower_bound=lower_bound, implementation=implementation)
    elementwise(out, oracle.gate(raw, None, g.dt_bias, lower_bound))
    zero = ops.kda_gate(raw, np.zeros_like(g.A_log), g.dt_bias, lower_bound=lower_bound, implementation=implementation)
    np.testing.assert_array_equal(out, zero)


def test_softplus_keeps_weak_decays(implementation):
    """log(1 + exp(x)) without log1p is 0 or 1.2e-7 below x = -15: a channel that never forgets."""
    raw = np.linspace(-19, -10, DIMS.K, dtype=F32).reshape(1, DIMS.K)
    out = ops.kda_gate(raw, np.zeros(1, F32), np.zeros((1, DIMS.K), F32), implementation=implementation)
    elementwise(out, oracle.gate(raw, None, np.zeros((1, DIMS.K))))


@BOUNDS
def test_extreme_inputs_stay_finite(implementation, lower_bound):
    raw = np.array([-1e30, -1e4, -200, -89, 19.9, 20.1, 89, 200, 1e4, 1e30], F32)[None]
    A_log, dt_bias = np.full(1, np.log(4), F32), np.zeros((1, 10), F32)

    def total(raw, A_log, dt_bias):
        out = ops.kda_gate(raw, A_log, dt_bias, lower_bound=lower_bound, implementation=implementation)
        return out.sum(where=np.arange(10) < 9), out

    grads, out = jax.grad(total, argnums=(0, 1, 2), has_aux=True)(raw, A_log, dt_bias)
    assert np.isfinite(out).all()
    assert all(np.isfinite(x).all() for x in grads)
    if lower_bound is None:
        np.testing.assert_allclose(out[0, 4:], oracle.gate(raw, A_log, dt_bias)[0, 4:], rtol=GATE_ELEMENT)
    else:
        assert (np.asarray(out) >= lower_bound).all()


@BOUNDS
def test_gradients(implementation, lower_bound):
    g = gate(3, DIMS, lower_bound)
    raw, dg = rng(3).uniform(-9, 9, (6, DIMS.HV, DIMS.K)).astype(F32), rng(4).normal(size=(6, DIMS.HV, DIMS.K))

    def total(raw_gate, A_log, dt_bias):
        out = ops.kda_gate(raw_gate, A_log, dt_bias, lower_bound=lower_bound, implementation=implementation)
        return (out * dg.astype(F32)).sum()

    grads = jax.grad(total, argnums=(0, 1, 2))(raw, g.A_log, g.dt_bias)
    want = oracle.gate_gradients(dg, raw, g.A_log, g.dt_bias, lower_bound)
    for x, (name, ref) in zip(grads, want.items(), strict=True):
        np.testing.assert_allclose(x, ref, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_l2_normalize(dtype):
    """The small vectors tell an eps inside the root on the sum from one on the mean, outside, or in a maximum."""
    x = rng(5).normal(size=(6, 3, DIMS.K)) * np.array([1e-5, 1e-4, 1e-3, 1e-2, 1, 1e3])[:, None, None]
    x = x.astype(dtype)
    elementwise(ops.l2_normalize(x), oracle.l2_normalize(x))
    elementwise(ops.l2_normalize(x, eps=0.01), oracle.l2_normalize(x, eps=0.01))


def test_l2_normalize_of_zero():
    x = jnp.zeros((2, DIMS.K))
    np.testing.assert_array_equal(ops.l2_normalize(x), x)
    slope = jax.grad(lambda x: ops.l2_normalize(x).sum())(x)
    np.testing.assert_allclose(slope, 1e3, rtol=1e-5)


BAD = {
    "raw_gate rank": (r"\braw_gate\b", {"raw_gate": np.zeros(DIMS.K, F32)}),
    "raw_gate integer": (r"\braw_gate\b", {"raw_gate": np.zeros((3, DIMS.HV, DIMS.K), np.int32)}),
    "A_log shape": (r"\bA_log\b", {"A_log": np.zeros(DIMS.HV + 1, F32)}),
    "A_log rank": (r"\bA_log\b", {"A_log": np.zeros((1, 1, DIMS.HV, 1), F32)}),
    "dt_bias flat": (r"\bdt_bias\b", {"dt_bias": np.zeros(DIMS.HV * DIMS.K, F32)}),
    "dt_bias shape": (r"\bdt_bias\b", {"dt_bias": np.zeros((DIMS.HV, DIMS.K + 1), F32)}),
    "bound zero": (r"\blower_bound\b", {"lower_bound": 0.0}),
    "bound positive": (r"\blower_bound\b", {"lower_bound": 5.0}),
    "bound too low": (r"\blower_bound\b", {"lower_bound": -5.01}),
    "bound nan": (r"\blower_bound\b", {"lower_bound": float("nan")}),
    "implementation": (r"\bimplementation\b.*cuda", {"implementation": "cuda"}),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    match, change = BAD[case]
    g = gate(1, DIMS)
    arguments = {"raw_gate": np.zeros((3, DIMS.HV, DIMS.K), F32), "A_log": g.A_log, "dt_bias": g.dt_bias} | change
    with pytest.raises(ValueError, match=match):
        ops.kda_gate(**arguments)


@pytest.mark.parametrize("lower_bound", [0.0, 1.0, -5.01, float("nan")])
def test_gate_params_refuse_a_bound_outside(lower_bound):
    g = gate(1, DIMS)
    with pytest.raises(ValueError, match=r"\blower_bound\b"):
        ops.GateParams(g.A_log, g.dt_bias, lower_bound=lower_bound)


def test_bound_of_exactly_minus_five_is_allowed():
    g = gate(1, DIMS, -5.0)
    assert g.params(ops).lower_bound == -5.0
