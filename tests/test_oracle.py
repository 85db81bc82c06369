"""The references and the error measure themselves: what everything else is judged by."""

import numpy as np
import pytest

from tests import oracle
from tests.ops.inputs import Dims, gate, rng, states, tokens
from tests.tolerances import assert_close, relative_rms


def test_relative_rms():
    assert relative_rms([3.0, 4.0], [3.0, 4.0]) == 0
    assert relative_rms([3.0, 5.0], [3.0, 4.0]) == pytest.approx(1 / 5)
    assert relative_rms([np.nan, 4.0], [3.0, 4.0]) == np.inf
    assert relative_rms([np.inf, 4.0], [3.0, 4.0]) == np.inf
    assert relative_rms([0.0, 0.0], [0.0, 0.0]) == 0
    assert relative_rms([0.0, 1e-30], [0.0, 0.0]) == np.inf
    for x, ref in [([1.0], [1.0, 1.0]), ([], []), ([1.0], [np.nan])]:
        with pytest.raises(ValueError, match="ref"):
            relative_rms(x, ref)
    with pytest.raises(AssertionError, match="the state"):
        assert_close([np.nan], [1.0], 1e9, "the state")


def test_recurrence_in_matrix_form():
    """S_t = (I - beta k k^T) Diag(exp g) S_{t-1} + beta k v^T, key first, for one head."""
    K, V, T = 5, 3, 6
    r = rng(1)
    q, k, v = r.normal(size=(T, K)), oracle.l2_normalize(r.normal(size=(T, K))), r.normal(size=(T, V))
    g, beta, S = -r.uniform(0, 3, (T, K)), r.uniform(0, 1, T), r.normal(size=(K, V))
    lead = [x[None, :, None] for x in (q, k, v, g, beta)]
    o, state = oracle.recurrent(*lead, initial_state=S.T[None, None], scale=0.3)
    for t in range(T):
        S = (np.eye(K) - beta[t] * np.outer(k[t], k[t])) @ np.diag(np.exp(g[t])) @ S + beta[t] * np.outer(k[t], v[t])
        np.testing.assert_allclose(o[0, t, 0], S.T @ (0.3 * q[t]), rtol=1e-12)
    np.testing.assert_allclose(state[0, 0], S.T, rtol=1e-12)


def difference(f, x, index, step=1e-6):
    ends = []
    for sign in (1, -1):
        moved = x.copy()
        moved[index] += sign * step
        ends.append(f(moved))
    return (ends[0] - ends[1]) / (2 * step)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_adjoints_against_finite_differences(lower_bound):
    B, T, H, HV, K, V = 2, 4, 1, 2, 3, 2
    r = rng(2)
    x = {
        "q": r.normal(size=(B, T, H, K)),
        "k": oracle.l2_normalize(r.normal(size=(B, T, H, K))),
        "v": r.normal(size=(B, T, HV, V)),
        "beta": r.uniform(0, 1, (B, T, HV)),
        "initial_state": r.normal(size=(B, HV, V, K)),
        "raw_gate": r.normal(size=(B, T, HV, K)),
        "A_log": r.normal(size=HV) / 2,
        "dt_bias": r.normal(size=(HV, K)),
    }
    do, ds, lengths = r.normal(size=(B, T, HV, V)), r.normal(size=(B, HV, V, K)), [4, 2]
    names = ("q", "k", "v", "beta", "initial_state")

    def loss(x):
        g = oracle.gate(x["raw_gate"], x["A_log"], x["dt_bias"], lower_bound)
        o, state = oracle.recurrent(**{n: x[n] for n in names}, log_decay=g, lengths=lengths)
        return (o * do).sum() + (state * ds).sum()

    g = (x["raw_gate"], x["A_log"], x["dt_bias"], lower_bound)
    grads = oracle.recurrent_gradients(do, ds, **{n: x[n] for n in names}, log_decay=oracle.gate(*g), lengths=lengths)
    grads |= oracle.gate_gradients(grads.pop("log_decay"), *g)
    for name in x:
        numeric = np.zeros(x[name].shape)
        for index in np.ndindex(numeric.shape):
            numeric[index] = difference(lambda a, name=name: loss(x | {name: a}), x[name], index)
        assert_close(grads[name], numeric, 1e-7, f"d {name}")


def test_commit_three_ways():
    """Replayed decode, folded records and the closed form are one state."""
    dims, W, n = Dims(), 6, 4
    g, pool = gate(3, dims), states(3, 3, dims)
    q, k, v, raw_gate, raw_beta = tokens(3, 1, W, dims, np.float64, g)
    _, records = oracle.verify(q, k, v, raw_gate, raw_beta, g, pool, [2], [W])
    plan = oracle.plan_commit([n], [W], [2])
    replayed = oracle.commit(pool, q, k, v, raw_gate, raw_beta, g, plan)[2]
    assert_close(oracle.fold(pool, records, g, plan)[2], replayed, 1e-13, "folded")
    decay = oracle.gate(raw_gate[0], g.A_log, g.dt_bias)
    key = oracle.heads(oracle.l2_normalize(k[0]), dims.HV, 1)
    closed = oracle.f64(pool[2]) * np.exp(decay[:n].sum(axis=0))[:, None]
    for t in range(n):
        u = records.correction[0, :, t]
        closed = closed + u[:, :, None] * (key[t] * np.exp(decay[t + 1 : n].sum(axis=0)))[:, None]
    assert_close(closed, replayed, 1e-13, "closed form")
