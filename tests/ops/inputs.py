"""Arguments for the operations: random arrays (numpy), regimes of decay, pools that punish a stray read or write."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from tests import oracle

BF16 = np.dtype(jnp.bfloat16)
F32 = np.dtype(np.float32)


class Dims(NamedTuple):
    """H query/key heads, HV value heads, K key dim, V value dim (never K == V)."""

    H: int = 2
    HV: int = 4
    K: int = 16
    V: int = 24

    def __str__(self):
        return "-".join(map(str, self))


DIMS = Dims()
# GVA or not, groups of 2 and 3, V below and above K
MORE_DIMS = (Dims(2, 2, 16, 24), Dims(1, 3, 32, 8), Dims(2, 6, 12, 20))


def rng(*seed):
    return np.random.default_rng(seed)


# --- decay -----------------------------------------------------------------------------------------------------------


def _every(period, strong, weak):
    def make(r, shape):
        spike = np.arange(shape[0]) % period == period // 2
        return np.broadcast_to(np.where(spike, strong, weak)[:, None, None], shape)

    return make


def _constant(value):
    return lambda r, shape: np.full(shape, value)


def _either(strong, weak, share=0.2):
    return lambda r, shape: np.where(r.random(shape) < share, strong, weak)


def _log_uniform(strong, weak):
    return lambda r, shape: -np.exp(r.uniform(np.log(weak), np.log(strong), shape))


# Log decay per step, [T, HV, K]. The spikes make the cumulative sum large while the decay that matters is weak.
DECAYS = {
    "weak": _constant(-0.001),
    "one": _constant(-1.0),
    "strong": _constant(-80.0),
    "spikes": _every(5, -80.0, -0.01),
    "channel_spikes": _either(-80.0, -0.01),
    "any": _log_uniform(80.0, 1e-3),
}
# The same for the bounded gate, whose values lie in (-5, 0).
BOUNDED_DECAYS = {
    "weak": _constant(-0.001),
    "strong": _constant(-4.999),
    "spikes": _every(5, -4.999, -0.01),
    "channel_spikes": _either(-4.999, -0.01),
    "any": _log_uniform(4.999, 1e-3),
}


def log_decays(seed, T, dims, decays):
    """[len(decays), T, HV, K] fp32: a row for each regime."""
    return np.stack([make(rng(seed, i), (T, dims.HV, dims.K)) for i, make in enumerate(decays.values())]).astype(F32)


# --- the recurrence --------------------------------------------------------------------------------------------------


def sequence(seed, T, dims=DIMS, dtype=F32, decays=DECAYS):
    """Arguments of kda_recurrent and kda_chunked by name, a batch row for each regime of decay."""
    r, B = rng(seed), len(decays)
    return {
        "q": oracle.l2_normalize(r.normal(size=(B, T, dims.H, dims.K))).astype(dtype),
        "k": oracle.l2_normalize(r.normal(size=(B, T, dims.H, dims.K))).astype(dtype),
        "v": r.normal(size=(B, T, dims.HV, dims.V)).astype(dtype),
        "log_decay": log_decays(seed, T, dims, decays),
        "beta": r.uniform(0, 1, (B, T, dims.HV)).astype(F32),
        "initial_state": r.normal(size=(B, dims.HV, dims.V, dims.K)).astype(F32),
    }


# --- the gate and what precedes it -----------------------------------------------------------------------------------


class Gate(NamedTuple):
    """What ops.GateParams holds; `params(ops)` makes that."""

    A_log: np.ndarray | None
    dt_bias: np.ndarray
    lower_bound: float | None = None

    def params(self, ops):
        return ops.GateParams(self.A_log, self.dt_bias, lower_bound=self.lower_bound)


def gate(seed, dims=DIMS, lower_bound=None, layers=()):
    """a up to 16, where the softplus form reaches -80 a step."""
    r = rng(seed, 77)
    low = 0.0 if lower_bound is None else -0.5
    high = np.log(16) if lower_bound is None else 0.5
    A_log = r.uniform(low, high, (*layers, dims.HV)).astype(F32)
    return Gate(A_log, r.normal(size=(*layers, dims.HV, dims.K)).astype(F32), lower_bound)


def raw_gate_for(log_decay, g: Gate):
    """The raw gate [..., HV, K] (fp64) whose log decay this is."""
    a = np.exp(oracle.f64(g.A_log))[:, None]
    if g.lower_bound is None:
        y = -oracle.f64(log_decay) / a
        x = np.where(y > 20, y, np.log(np.expm1(np.minimum(y, 20))))
    else:
        s = oracle.f64(log_decay) / g.lower_bound
        x = np.log(s / (1 - s)) / a
    return x - oracle.f64(g.dt_bias)


def tokens(seed, R, W, dims=DIMS, dtype=F32, g: Gate | None = None, decays=DECAYS):
    """q, k, v, raw_gate, raw_beta of kda_verify, [R, W, ...], in this order; row r has the r-th regime, cyclically."""
    r, g = rng(seed, 5), g or gate(seed, dims)
    makers = list(decays.values())
    log_decay = np.stack([makers[i % len(makers)](rng(seed, i), (W, dims.HV, dims.K)) for i in range(R)])
    return (
        (3 * r.normal(size=(R, W, dims.H, dims.K))).astype(dtype),
        (0.3 * r.normal(size=(R, W, dims.H, dims.K))).astype(dtype),
        r.normal(size=(R, W, dims.HV, dims.V)).astype(dtype),
        raw_gate_for(log_decay, g).astype(dtype),
        r.normal(size=(R, W, dims.HV)).astype(dtype),
    )


# --- pools and padding -----------------------------------------------------------------------------------------------


def pool(seed, shape, nan_slots=(0,), dtype=F32):
    """[N, ...] random, with NaN in slot 0 and in the other slots named. fp32 NaNs carry a payload: a rewrite shows."""
    x = rng(seed, 6).normal(size=shape).astype(dtype)
    x[list(nan_slots)] = np.uint32(0x7FC12345).view(F32) if x.dtype == F32 else np.nan
    return x


def states(seed, N, dims=DIMS, nan_slots=(0,), dtype=F32):
    return pool(seed, (N, dims.HV, dims.V, dims.K), nan_slots, dtype)


def nan_past(x, lengths):
    """A copy of x [B, T, ...] with NaN at and past each row's length."""
    x = x.copy()
    for row, n in zip(x, lengths, strict=True):
        row[n:] = np.nan
    return x
