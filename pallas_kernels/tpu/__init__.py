"""TPU route: decode, verify, folded verify and commit with prefetched slots; convolutions are left to XLA.

Arrays in, arrays out, as on the Triton route. The kernels lower for a TPU and are right in its interpreter; they have
not run on one.
"""

import jax.numpy as jnp

from pallas_kernels.tpu.commit import commit
from pallas_kernels.tpu.window import decode, verify, verify_after_commit

__all__ = ["commit", "decode", "supports", "verify", "verify_after_commit"]

MAX_WINDOW = 32
MAX_DIM = 256
_ACTIVATIONS = ("float32", "bfloat16")
_STATES = ("float32", "bfloat16")


def supports(op, *, K, V, W, dtype, state_dtype, device_kind=None) -> str | None:
    """None where the kernel ``op`` runs these sizes, else why not."""
    if op.startswith("conv"):
        return f"there is no kernel {op} for a TPU"
    dtype, state_dtype = jnp.dtype(dtype).name, jnp.dtype(state_dtype).name
    if dtype not in _ACTIVATIONS:
        return f"activations must be one of {', '.join(_ACTIVATIONS)}, got {dtype}"
    if state_dtype not in _STATES:
        return f"the pool must be one of {', '.join(_STATES)}, got {state_dtype}"
    if not 1 <= W <= MAX_WINDOW:
        return f"the window must be in [1, {MAX_WINDOW}], got {W}"
    for name, size in (("K", K), ("V", V)):
        if size % 16 or not 16 <= size <= MAX_DIM:
            return f"{name} must be a multiple of 16 in [16, {MAX_DIM}], got {size}"
    return None
