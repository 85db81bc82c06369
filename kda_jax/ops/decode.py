"""One token a request, straight on the slot pool."""

import chex
import jax
import jax.numpy as jnp

from kda_jax.ops._checks import Dims, choose
from kda_jax.ops._kernels import check_gate_params, find_kernel, gate_arguments
from kda_jax.ops._slots import read_slots, write_slots
from kda_jax.ops.gate import GateParams, apply_gate, l2_normalize
from kda_jax.ops.recurrent import recurrent_step, repeat_heads


def kda_decode(q, k, v, raw_gate, raw_beta, gate: GateParams, state_pool, slots, *, implementation=None):
    """Advance each request's state by one token.

    Args:
      q, k: [R, H, K] after the short convolution, before normalisation (done here, with ``q`` scaled by ``K ** -0.5``).
      v: [R, HV, V].
      raw_gate: [R, HV, K], raw_beta: [R, HV]: projections before gate and sigmoid.
      gate: ``GateParams``.
      state_pool: [N, HV, V, K]; donate it to update it in place.
      slots: int [R]; 0 is the null slot: output zero, nothing read or written. Slots must differ between live rows.

    Returns:
      ``o`` [R, HV, V] in the dtype of ``v``, and the next pool.

    Raises:
      ValueError: a shape or dtype that does not fit, naming the argument.
    """
    choose("kda_decode", implementation)
    dims = Dims()
    dims.check("q", q, "R H K")
    dims.check("k", k, "R H K")
    dims.check("v", v, "R HV V")
    dims.check_groups()
    dims.check("raw_gate", raw_gate, "R HV K")
    dims.check("raw_beta", raw_beta, "R HV")
    dims.check("state_pool", state_pool, "N HV V K")
    dims.check("slots", slots, "R", kind="int")
    check_gate_params(dims, gate)
    HV, K = dims["HV"], dims["K"]
    case = {"K": K, "V": dims["V"], "W": 1, "dtype": v.dtype, "state_dtype": state_pool.dtype}
    kernel = find_kernel("kda_decode", implementation, **case)
    if kernel is not None:
        return kernel(q, k, v, raw_gate, raw_beta, *gate_arguments(gate), state_pool, slots)
    live = slots > 0
    state, output, _ = recurrent_step(
        read_slots(state_pool[None], slots)[0].astype(jnp.float32),
        repeat_heads(l2_normalize(q) * K**-0.5, HV, 1),
        repeat_heads(l2_normalize(k), HV, 1),
        v.astype(jnp.float32),
        apply_gate(raw_gate, gate),
        jax.nn.sigmoid(raw_beta.astype(jnp.float32)),
    )
    chex.assert_shape(state, (dims["R"], HV, dims["V"], K))
    chex.assert_type(state, jnp.float32)
    return jnp.where(live[:, None, None], output, 0).astype(v.dtype), write_slots(state_pool[None], slots, state[None])[
        0
    ]
