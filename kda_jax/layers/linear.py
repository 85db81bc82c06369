"""The linear map and the norms every block uses."""

import jax
import jax.numpy as jnp


def matmul_precision(dtype) -> jax.lax.Precision:
    """fp32 activations get fp32 products on every backend; narrower ones accumulate in fp32 as the backend does."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def linear(x, weight, *, output_dtype=None):
    """``y = x W^T``: [..., in], [out, in] -> [..., out], accumulated in fp32, in the dtype of ``x`` unless asked."""
    return jnp.einsum(
        "...i,oi->...o",
        x,
        weight.astype(x.dtype),
        precision=matmul_precision(x.dtype),
        preferred_element_type=output_dtype or x.dtype,
    )


def _normalize(x, eps: float):
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def _broadcast(weight, ndim: int):
    return weight.reshape((1,) * (ndim - 1) + weight.shape)


def rms_norm(x, weight, eps: float):
    """RMSNorm over the last axis: fp32 statistics, rounded to the dtype of ``x``, then times ``weight`` [D]."""
    return _normalize(x, eps).astype(x.dtype) * _broadcast(weight, x.ndim).astype(x.dtype)


def gated_rms_norm(x, weight, gate, eps: float):
    """``RMSNorm(x) * weight * sigmoid(gate)`` over the last axis, in fp32, rounded once to the dtype of ``gate``."""
    y = _normalize(x, eps) * _broadcast(weight, x.ndim).astype(jnp.float32)
    return (y * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(gate.dtype)
