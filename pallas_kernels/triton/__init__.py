"""Triton route: NVIDIA GPUs from compute capability 8.0, jax 0.10 and newer; interpreted anywhere.

Arrays in, arrays out: q, k [R,W,H,K] (decode: [R,H,K]), v [R,W,HV,V], raw_gate [R,W,HV,K], raw_beta [R,W,HV] as the
layer computed them, A_log [HV] or None, dt_bias [HV,K], lower_bound None or a float, pools [N,HV,V,K], slots and
lengths int32 [R]; slot 0 is null. Pools are updated in place where the caller donates them.
"""

import jax.numpy as jnp

from pallas_kernels.triton.commit import commit
from pallas_kernels.triton.conv import conv_commit, conv_step, conv_step_after_commit
from pallas_kernels.triton.decode import decode
from pallas_kernels.triton.window import verify, verify_after_commit

__all__ = [
    "commit",
    "conv_commit",
    "conv_step",
    "conv_step_after_commit",
    "decode",
    "supports",
    "verify",
    "verify_after_commit",
]

MAX_WINDOW = 32
MAX_DIM = 256
_CONVOLUTIONS = ("conv_step", "conv_commit", "conv_step_after_commit")
_ACTIVATIONS = ("float32", "bfloat16", "float16")
_STATES = ("float32", "bfloat16")


def supports(op, *, K, V, W, dtype, state_dtype, device_kind=None) -> str | None:
    """None where the kernel ``op`` runs these sizes, else why not. Of a convolution ``K`` is channels, ``V`` taps."""
    dtype, state_dtype = jnp.dtype(dtype).name, jnp.dtype(state_dtype).name
    if dtype not in _ACTIVATIONS:
        return f"activations must be one of {', '.join(_ACTIVATIONS)}, got {dtype}"
    states = _ACTIVATIONS if op in _CONVOLUTIONS else _STATES
    if state_dtype not in states:
        return f"the pool must be one of {', '.join(states)}, got {state_dtype}"
    if not 1 <= W <= MAX_WINDOW:
        return f"the window must be in [1, {MAX_WINDOW}], got {W}"
    if op in _CONVOLUTIONS:
        return None if V >= 2 else f"the convolution must have at least 2 taps, got {V}"
    for name, size in (("K", K), ("V", V)):
        if not 1 <= size <= MAX_DIM:
            return f"{name} must be in [1, {MAX_DIM}], got {size}"
    return None
