"""How far a result may be from its reference, by dtype: the one table, and the one measure it is read with."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Tolerance:
    """Largest relative RMS error allowed, for inputs of one dtype.

    output: activations, which are rounded once to the dtype.
    state: states and corrections of the sequential forms and of commit. They are computed in fp32 from values that are
        exact in the input dtype, so the input dtype doesn't matter.
    chunk_state: the final state of the chunked form, whose matrix operands may be rounded to the input dtype.
    gradient: gradients of the chunked form, sums of more and of cancelling terms.
    gate_gradient: gradients of the parameters of the decay gate, sums over all rows of a batch of terms of both signs.
    """

    output: float
    state: float
    chunk_state: float
    gradient: float
    gate_gradient: float


TOLERANCES = {
    # fp32 rounds at 6e-8. A few hundred roundings that don't favour a sign reach about 1e-6; an exponent taken as the
    # difference of two cumulative sums is wrong by 1e-5 to 4e-2 at strong decay.
    "float32": Tolerance(output=1e-5, state=1e-5, chunk_state=1e-5, gradient=2e-5, gate_gradient=2e-5),
    # bf16 rounds at 2e-3 (1.1e-3 RMS). Outputs are rounded once, matrix operands once more.
    "bfloat16": Tolerance(output=5e-3, state=1e-5, chunk_state=5e-3, gradient=8e-3, gate_gradient=2e-2),
}

# Gates are elementwise: each element is held to this relative error. The fp32 sum in front of the exponential may be
# off by half a unit of 16, which the exponential turns into a relative error of 1e-6.
GATE_ELEMENT = 5e-6

# A bf16 state pool is read exactly and rounded once when it is written.
BF16_POOL = 5e-3


def tolerance(dtype) -> Tolerance:
    """The row of the table for `dtype` (anything numpy understands as a dtype, bfloat16 included)."""
    return TOLERANCES[np.dtype(dtype).name]


def relative_rms(x, ref) -> float:
    """rms(x - ref) / rms(ref), in fp64.

    Infinity if `x` holds anything that isn't finite, so NaN never passes. Against a reference that is zero everywhere
    it is 0 if `x` is too, else infinity. `ValueError` for shapes that differ, for empty arrays (nothing would have
    been compared) and for a reference that isn't finite.
    """
    x, ref = np.asarray(x).astype(np.float64), np.asarray(ref).astype(np.float64)
    if x.shape != ref.shape:
        raise ValueError(f"x has shape {x.shape}, ref has shape {ref.shape}")
    if x.size == 0:
        raise ValueError("x and ref are empty: nothing to compare")
    if not np.isfinite(ref).all():
        raise ValueError("ref holds values that aren't finite")
    if not np.isfinite(x).all():
        return float("inf")
    size, error = np.sqrt(np.mean(ref**2)), np.sqrt(np.mean((x - ref) ** 2))
    if size == 0:
        return 0.0 if error == 0 else float("inf")
    return float(error / size)


def assert_close(x, ref, limit: float, what: str) -> None:
    """Assert relative_rms(x, ref) <= limit; `what` names the quantity in the message."""
    error = relative_rms(x, ref)
    assert error <= limit, f"{what}: relative RMS error {error:.3g} > {limit:.3g}"
