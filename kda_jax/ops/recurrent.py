"""The recurrence itself: the definition every other form is measured against."""

import jax
import jax.numpy as jnp

from kda_jax.ops._checks import Dims, choose

HIGHEST = jax.lax.Precision.HIGHEST


def check_sequence_inputs(q, k, v, log_decay, beta, initial_state, lengths) -> Dims:
    """Check the arguments shared by ``kda_recurrent`` and ``kda_chunked``; returns the dimensions."""
    dims = Dims()
    dims.check("q", q, "B T H K")
    dims.check("k", k, "B T H K")
    dims.check("v", v, "B T HV V")
    dims.check_groups()
    dims.check("log_decay", log_decay, "B T HV K")
    dims.check("beta", beta, "B T HV")
    if initial_state is not None:
        dims.check("initial_state", initial_state, "B HV V K")
    if lengths is not None:
        dims.check("lengths", lengths, "B", kind="int")
    return dims


def mask_sequence(q, k, v, log_decay, beta, lengths):
    """fp32 inputs with everything at or past ``lengths`` replaced by what leaves a state alone (all zeros)."""
    arrays = [x.astype(jnp.float32) for x in (q, k, v, log_decay, beta)]
    if lengths is None:
        return arrays
    valid = jnp.arange(q.shape[1])[None] < lengths[:, None]
    return [jnp.where(valid.reshape(valid.shape + (1,) * (x.ndim - 2)), x, 0) for x in arrays]


def repeat_heads(x, value_heads: int, axis: int):
    """Give each value head its query/key head: head ``hv`` uses ``hv // (HV // H)``."""
    groups = value_heads // x.shape[axis]
    return x if groups == 1 else jnp.repeat(x, groups, axis=axis)


def recurrent_step(state, q, k, v, log_decay, beta):
    """One token. ``state`` [..., V, K]; ``q`` (already scaled), ``k``, ``log_decay`` [..., K]; ``v`` [..., V];
    ``beta`` [...]; all fp32. Returns (state, output [..., V], correction [..., V]).

    The decayed state is not formed to be read: ``(S * a) k = S (a * k)``, and likewise for the output,
    ``(S * a + u k^T) q = S (a * q) + u (k . q)``.
    """
    decay = jnp.exp(log_decay)
    # the barrier keeps what made these small vectors from being computed again for every element of the state
    q, k, v, decay, beta = jax.lax.optimization_barrier((q, k, v, decay, beta))
    seen = jnp.einsum("...vk,...nk->...nv", state, jnp.stack([k * decay, q * decay], axis=-2), precision=HIGHEST)
    correction = beta[..., None] * (v - seen[..., 0, :])
    output = seen[..., 1, :] + correction * jnp.sum(q * k, axis=-1, keepdims=True)
    correction = jax.lax.optimization_barrier(correction)
    state = state * decay[..., None, :] + correction[..., :, None] * k[..., None, :]
    return state, output, correction


def kda_recurrent(q, k, v, log_decay, beta, *, initial_state=None, scale=None, lengths=None, implementation=None):
    """Token-by-token Kimi Delta Attention.

    Per value head, in fp32: ``S <- S * exp(g_t)``; ``u_t = beta_t (v_t - S k_t)``; ``S <- S + u_t k_t^T``;
    ``o_t = S (scale * q_t)`` (Kimi Linear, the gated delta rule with a decay per key channel).

    Args:
      q, k: [B, T, H, K] as they enter the recurrence, already L2-normalised.
      v: [B, T, HV, V] with ``HV % H == 0``; value head ``hv`` uses query/key head ``hv // (HV // H)``.
      log_decay: [B, T, HV, K], natural log, ``<= 0``.
      beta: [B, T, HV] write strength.
      initial_state: [B, HV, V, K] or None for zeros.
      scale: multiplies ``q``; default ``K ** -0.5``.
      lengths: int [B] or None; tokens at or past a row's length may hold anything, leave the state alone and give 0.

    Returns:
      ``o`` [B, T, HV, V] in the dtype of ``v``, and the state after the last valid token [B, HV, V, K] fp32.

    Raises:
      ValueError: a shape or dtype that does not fit, naming the argument.
    """
    choose("kda_recurrent", implementation)
    dims = check_sequence_inputs(q, k, v, log_decay, beta, initial_state, lengths)
    B, HV, V, K = dims["B"], dims["HV"], dims["V"], dims["K"]
    scale = K**-0.5 if scale is None else scale
    dtype = v.dtype
    q, k, v, log_decay, beta = mask_sequence(q, k, v, log_decay, beta, lengths)
    q, k = repeat_heads(q * scale, HV, 2), repeat_heads(k, HV, 2)
    state = jnp.zeros((B, HV, V, K), jnp.float32) if initial_state is None else initial_state.astype(jnp.float32)

    def step(state, token):
        state, output, _ = recurrent_step(state, *token)
        return state, output

    tokens = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, log_decay, beta))
    state, outputs = jax.lax.scan(step, state, tokens)
    return jnp.moveaxis(outputs, 0, 1).astype(dtype), state
