"""Decay gate, and the normalisation of queries and keys."""

import dataclasses

import jax
import jax.numpy as jnp

from kda_jax.config import check_gate_bound
from kda_jax.ops._checks import Dims, check_fp32, choose


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GateParams:
    """What turns raw gates into log decays: ``A_log`` [HV] fp32 or None (rate 1), ``dt_bias`` [HV, K] fp32,
    ``lower_bound`` None (softplus gate) or in ``[-5, 0)`` (bounded gate; static)."""

    A_log: jax.Array | None
    dt_bias: jax.Array
    lower_bound: float | None = dataclasses.field(default=None, metadata={"static": True})


def kda_gate(raw_gate, A_log, dt_bias, *, lower_bound=None, implementation=None):
    """Log decay per value head and key channel.

    Args:
      raw_gate: [..., HV, K], any float dtype; the gate projection's output.
      A_log: [HV] fp32, log of the rate ``a``; None means ``a = 1``.
      dt_bias: [HV, K] fp32.
      lower_bound: None for the softplus gate ``-a * softplus(raw_gate + dt_bias)``; a number in ``[-5, 0)`` for the
        bounded gate ``lower_bound * sigmoid(a * (raw_gate + dt_bias))`` (Kimi Delta Attention, decay gates).

    Returns:
      [..., HV, K] fp32, natural-log decay a token, never positive.

    Raises:
      ValueError: a shape, dtype or bound that does not fit, naming the argument.
    """
    choose("kda_gate", implementation)
    check_gate_bound("lower_bound", lower_bound)
    if getattr(raw_gate, "ndim", 0) < 2:
        raise ValueError(f"raw_gate must have shape [..., HV, K], got {getattr(raw_gate, 'shape', type(raw_gate))}")
    dims = Dims()
    batch = " ".join(f"axis{i}" for i in range(raw_gate.ndim - 2))
    dims.check("raw_gate", raw_gate, f"{batch} HV K")
    dims.check("dt_bias", dt_bias, "HV K")
    check_fp32("dt_bias", dt_bias)
    x = raw_gate.astype(jnp.float32) + dt_bias.reshape((1,) * (raw_gate.ndim - 2) + dt_bias.shape)
    rate = jnp.ones((1, 1), jnp.float32)
    if A_log is not None:
        dims.check("A_log", A_log, "HV")
        check_fp32("A_log", A_log)
        rate = jnp.exp(A_log)[:, None]
    rate = rate.reshape((1,) * (raw_gate.ndim - 2) + rate.shape)
    if lower_bound is None:
        return -rate * jax.nn.softplus(x)
    return lower_bound * jax.nn.sigmoid(rate * x)


def apply_gate(raw_gate, gate: GateParams):
    """``kda_gate`` with its parameters in one object; same shapes and errors."""
    return kda_gate(raw_gate, gate.A_log, gate.dt_bias, lower_bound=gate.lower_bound)


def l2_normalize(x, eps: float = 1e-6):
    """``x / sqrt(sum(x^2) + eps)`` over the last axis, in fp32: [..., K] any float dtype -> [..., K] fp32.

    ``eps`` is added to the sum of squares (not the mean), so tiny vectors shrink instead of blowing up.
    """
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + eps)
