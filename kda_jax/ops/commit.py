"""Commit: fold accepted records into the checkpoints, all rows and layers at once."""

import chex
import jax
import jax.numpy as jnp

from kda_jax.ops._checks import Dims, check_fp32, choose
from kda_jax.ops._couplings import HIGHEST
from kda_jax.ops._kernels import check_gate_params, find_kernel, gate_arguments
from kda_jax.ops.gate import GateParams, apply_gate, l2_normalize
from kda_jax.ops.plan import CommitPlan, check_plan, plan_arguments, write_committed
from kda_jax.ops.recurrent import repeat_heads
from kda_jax.ops.verify import Records


def kda_commit(state_pool, records: Records, gate: GateParams, plan: CommitPlan, *, implementation=None):
    """Rebuild each request's state at its accepted position and write it back.

    ``S_n = S_0 * exp(sum of g) + sum over t < n of u_t (k_t * exp(sum of g over t+1..n-1))^T`` (RecoverSSM): no
    value, write strength or sequential dependence is left, and every exponent is a sum of non-positive decays.

    Args:
      state_pool: [N, HV, V, K] or [L, N, HV, V, K]; donate it to update it in place.
      records: from ``kda_verify``, with the pool's leading layer axis if it has one.
      gate: ``GateParams``, likewise ([L, HV], [L, HV, K]).
      plan: ``CommitPlan``; rows with ``commit_length`` 0 write nothing. No row may read or write a slot that another
        row writes: kernels finish one row after another.

    Returns:
      The next pool. Pure: applied twice, it commits twice.

    Raises:
      ValueError: a shape or dtype that does not fit, naming the argument.
    """
    choose("kda_commit", implementation)
    layered = getattr(state_pool, "ndim", 0) == 5
    lead = "L " if layered else ""
    dims = Dims()
    dims.check("state_pool", state_pool, lead + "N HV V K")
    dims.check("records.correction", records.correction, lead + "R HV W V")
    check_fp32("records.correction", records.correction)
    dims.check("records.key", records.key, lead + "R H W K")
    dims.check_groups("records.key")
    dims.check("records.raw_gate", records.raw_gate, lead + "R HV W K")
    check_gate_params(dims, gate, lead)
    check_plan(dims, plan)
    if not layered:
        state_pool, records, gate = jax.tree.map(lambda x: x[None], (state_pool, records, gate))
    sizes = {name: dims[name] for name in ("K", "V", "W")}
    dtypes = {"dtype": records.key.dtype, "state_dtype": state_pool.dtype}
    kernel = find_kernel("kda_commit", implementation, **sizes, **dtypes)
    if kernel is not None:
        arrays = state_pool, records.correction, records.key, records.raw_gate
        next_pool = kernel(*arrays, *gate_arguments(gate), *plan_arguments(plan))
        return next_pool if layered else next_pool[0]

    def keys_and_decay(records, gate):
        gates = jnp.swapaxes(apply_gate(jnp.swapaxes(records.raw_gate, 1, 2), gate), 1, 2)
        return repeat_heads(l2_normalize(records.key), dims["HV"], 1), gates

    keys, log_decay = jax.vmap(keys_and_decay)(records, gate)  # [L, R, HV, W, K]

    def advance(source, length):
        folded = (jnp.arange(dims["W"])[None] < length[:, None])[None, :, None, :, None]
        g = jnp.where(folded, log_decay, 0)
        after = jnp.flip(jnp.cumsum(jnp.flip(g[..., 1:, :], -2), axis=-2), -2)
        after = jnp.concatenate([after, jnp.zeros_like(g[..., :1, :])], axis=-2)
        decay = jnp.exp(after[..., 0, :] + g[..., 0, :])[..., None, :]
        correction = jnp.where(folded, records.correction, 0)
        carried = jnp.where(folded, keys, 0) * jnp.exp(after)
        update = jnp.einsum("lrhwv,lrhwk->lrhvk", correction, carried, precision=HIGHEST)
        return source.astype(jnp.float32) * decay + update

    next_pool = write_committed(state_pool, plan, advance)
    chex.assert_equal_shape([next_pool, state_pool])
    chex.assert_type(next_pool, state_pool.dtype)
    return next_pool if layered else next_pool[0]
