"""Gradients of kda_chunked, with the gate inside the differentiated function, against the fp64 adjoint."""

import functools

import jax
import numpy as np
import pytest

from kda_jax import ops
from tests import oracle
from tests.ops.harness import assert_zero_past
from tests.ops.inputs import BF16, BOUNDED_DECAYS, DECAYS, DIMS, F32, gate, nan_past, raw_gate_for, rng, sequence
from tests.tolerances import assert_close, tolerance

OPS = ("kda_chunked", "kda_gate")
# Gradients take long to compile and a moment to run
COMPILER_OPTIONS = {"xla_backend_optimization_level": 0}


@functools.cache
def gradient(lower_bound, chunk_size, implementation):
    def loss(x, lengths, do, ds):
        g = ops.kda_gate(x["raw_gate"], x["A_log"], x["dt_bias"], lower_bound=lower_bound)
        rest = {name: x[name] for name in ("q", "k", "v", "beta", "initial_state")}
        bounded = lower_bound is not None
        o, state = ops.kda_chunked(
            **rest, log_decay=g, lengths=lengths, chunk_size=chunk_size, bounded=bounded, implementation=implementation
        )
        return (o.astype(F32) * do).sum() + (state * ds).sum()

    return jax.jit(jax.grad(loss), compiler_options=COMPILER_OPTIONS)


def draw(seed, T, lower_bound, dtype=F32):
    """Arguments with the raw gate in place of the decay, an upstream gradient for both results, and lengths."""
    g = gate(seed, DIMS, lower_bound)
    x = sequence(seed, T, DIMS, dtype, DECAYS if lower_bound is None else BOUNDED_DECAYS)
    raw_gate = raw_gate_for(x.pop("log_decay"), g).astype(F32)
    x |= {"raw_gate": raw_gate, "A_log": g.A_log, "dt_bias": g.dt_bias}
    do = rng(seed, 1).normal(size=x["v"].shape).astype(F32)
    ds = rng(seed, 2).normal(size=x["initial_state"].shape).astype(F32)
    lengths = np.full(len(raw_gate), T, np.int32)
    lengths[-2:] = [0, T // 2 + 1]
    return x, lengths, do, ds


def reference(x, lengths, do, ds, lower_bound):
    g = (x["raw_gate"], x["A_log"], x["dt_bias"], lower_bound)
    rest = {name: x[name] for name in ("q", "k", "v", "beta", "initial_state")}
    grads = oracle.recurrent_gradients(do, ds, **rest, log_decay=oracle.gate(*g), lengths=lengths)
    return grads | oracle.gate_gradients(grads.pop("log_decay"), *g)


def check(got, want, dtype):
    assert set(got) == set(want)
    table = tolerance(dtype)
    for name, ref in want.items():
        limit = table.gate_gradient if name in ("raw_gate", "A_log", "dt_bias") else table.gradient
        assert_close(got[name], ref, limit, f"d {name}")


@pytest.mark.parametrize(
    ("T", "chunk_size", "lower_bound"),
    [
        (1, 16, None),
        (37, 16, None),
        (37, 16, -5.0),
        (70, 64, None),
        pytest.param(70, 64, -5.0, marks=pytest.mark.slow),
        pytest.param(130, 32, None, marks=pytest.mark.slow),
    ],
)
def test_gradients(implementation, T, chunk_size, lower_bound):
    arguments = draw(T, T, lower_bound)
    got, want = gradient(lower_bound, chunk_size, implementation)(*arguments), reference(*arguments, lower_bound)
    check(got, want, F32)
    for b, name in enumerate(list(DECAYS if lower_bound is None else BOUNDED_DECAYS)[:-2]):
        for a in ("q", "k", "v", "beta"):  # each regime on its own; the other gradients vanish where decay is strong
            assert_close(got[a][b], want[a][b], tolerance(F32).gradient, f"d {a}, {name}")


@pytest.mark.parametrize("lower_bound", [None, pytest.param(-5.0, marks=pytest.mark.slow)])
def test_bf16_gradients(implementation, lower_bound):
    arguments = draw(3, 20, lower_bound, BF16)
    got = gradient(lower_bound, 16, implementation)(*arguments)
    assert all(got[name].dtype == BF16 for name in ("q", "k", "v"))
    check(got, reference(*arguments, lower_bound), BF16)


@pytest.mark.parametrize("bounded", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_padding_has_no_gradient(implementation, bounded):
    """NaN at and past lengths in every input: gradients there are zero, and elsewhere they are as without it."""
    decays = BOUNDED_DECAYS if bounded else {name: DECAYS[name] for name in list(DECAYS)[1:]}
    lengths = np.array([0, 1, 15, 33, 40], np.int32)
    x = sequence(8, 40, DIMS, decays=decays)
    x = {name: a if name == "initial_state" else nan_past(a, lengths) for name, a in x.items()}
    do, ds = rng(1).normal(size=x["v"].shape).astype(F32), rng(2).normal(size=x["initial_state"].shape).astype(F32)

    def loss(x):
        o, state = ops.kda_chunked(**x, lengths=lengths, chunk_size=16, bounded=bounded, implementation=implementation)
        return (o * do).sum() + (state * ds).sum()

    got = jax.jit(jax.grad(loss), compiler_options=COMPILER_OPTIONS)(x)
    for name, want in oracle.recurrent_gradients(do, ds, **x, lengths=lengths).items():
        assert_close(got[name], want, tolerance(F32).gradient, f"d {name}")
        if name != "initial_state":
            assert_zero_past(got[name], lengths, f"d {name}")
