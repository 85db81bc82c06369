"""Which sizes the Mosaic GPU kernels run, and why not the others."""

import jax
import jax.numpy as jnp

OPERATIONS = ("verify", "verify_after_commit", "commit", "decode")
WIDEST_WINDOW = 16


def supports(op, *, K, V, W, dtype, state_dtype, device_kind):
    """None where ``op`` runs with these sizes on a device of kind ``device_kind``, else the reason it does not.

    Args:
      op: one of ``OPERATIONS``.
      K, V: key and value channels of a head. W: window in tokens, at most (ignored by decode).
      dtype, state_dtype: of the activations and of the pool.
      device_kind: ``jax.Device.device_kind``.

    Raises:
      ValueError: ``op`` is none of these operations.
    """
    if op not in OPERATIONS:
        raise ValueError(f"op must be one of {OPERATIONS}, got {op!r}")
    if jax.__version_info__ < (0, 11):
        return f"the Mosaic GPU kernels need jax 0.11 or newer, this is {jax.__version__}"
    if not any(name in device_kind for name in ("H100", "H200", "H800", "H20", "GH200")):
        return f"the Mosaic GPU kernels need a Hopper GPU, not {device_kind!r}"
    if K != 128:
        return f"K must be 128, got {K}"
    if V % 64:
        return f"V must be a multiple of 64, got {V}"
    if op != "decode" and not 1 <= W <= WIDEST_WINDOW:
        return f"W must be 1..{WIDEST_WINDOW}, got {W}"
    if jnp.dtype(dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)):
        return f"activations must be bfloat16 or float32, got {jnp.dtype(dtype).name}"
    if jnp.dtype(state_dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)):
        return f"states must be bfloat16 or float32, got {jnp.dtype(state_dtype).name}"
    return None
