"""The mathematics of the kernels, as functions of values.

One head at a time, everything fp32 and two-dimensional: tokens are rows of a tile of ``T`` rows (``T >= W``), key
channels are columns, a row's scalar is [T, 1], a channel's is [1, K]; a state is [V, K]. Nothing here is sliced, and
the loops over the tokens of a window are unrolled, so the same lines serve a GPU's registers, a TPU's vectors and the
interpreter.

A window. With ``a_t`` the decay of token ``t`` (``exp`` of the log decay, per channel) and ``P_t = a_0 .. a_t``, the
delta rule ``u_t = b_t (v_t - S k_t)`` on the decayed state solves to

    u_t = b_t (v_t - S_0 (P_t k_t) - sum_{i<t} A_ti u_i),   A_ti = sum over channels of k_t k_i a_{i+1} .. a_t
    o_t = S_0 (P_t q_t) + sum_{i<=t} Q_ti u_i,              Q_ti likewise with q_t

so ``[u; o] = X S_0^T + C v`` with ``X`` and ``C`` independent of state and values. Every decay is a product of factors
<= 1 over exactly its own tokens: nothing overflows, nothing cancels, at any strength.
"""

import jax
import jax.numpy as jnp

FLOAT = jnp.float32
L2_EPS = 1e-6


def sigmoid(x):
    return 1.0 / (1.0 + jnp.exp(-x))


def softplus(x):
    """``log(1 + exp(x))`` to full relative accuracy, from exp and log alone (kernels lack ``log1p``)."""
    small = jnp.exp(-jnp.abs(x))
    total = 1.0 + small
    return jnp.maximum(x, 0.0) + jnp.where(
        total == 1.0, small, jnp.log(total) * (small / jnp.maximum(total - 1.0, 1e-30))
    )


def token_decay(raw_gate, bias, rate, lower_bound):
    """``exp`` of the log decay: ``-rate softplus(x)`` or ``lower_bound sigmoid(rate x)``, the gates of KDA."""
    x = raw_gate.astype(FLOAT) + bias
    return jnp.exp(-rate * softplus(x) if lower_bound is None else lower_bound * sigmoid(rate * x))


def normalized(x, scale=1.0):
    """Rows at unit length, times ``scale``."""
    x = x.astype(FLOAT)
    return x * (scale * jax.lax.rsqrt(jnp.sum(x * x, axis=1, keepdims=True) + L2_EPS))


def finite(x):
    return jnp.where(is_finite(x), x, 0.0)


def is_finite(x):
    return jnp.abs(x) < jnp.inf


def token_index(tile: int):
    return jax.lax.broadcasted_iota(jnp.int32, (tile, 1), 0)


def row(x, i: int):
    """Row ``i`` of a tile, [1, columns]: a sum over a mask, since values cannot be sliced."""
    return jnp.sum(jnp.where(token_index(x.shape[0]) == i, x, 0.0), axis=0, keepdims=True)


def window_inputs(q, k, raw_gate, raw_beta, bias, rate, lower_bound, length, key_dim: int):
    """What a layer computed, as it enters the recurrence: queries, keys, decays [T, K] and write strengths [T, 1].

    Rows at or past ``length`` get what leaves a state alone, and so does whatever is not finite.
    """
    inside = token_index(k.shape[0]) < length
    queries = jnp.where(inside, finite(normalized(q, key_dim**-0.5)), 0.0)
    keys = jnp.where(inside, finite(normalized(k)), 0.0)
    decay = token_decay(raw_gate, bias, rate, lower_bound)
    decay = jnp.where(inside & is_finite(decay), decay, 1.0)
    strength = sigmoid(raw_beta.astype(FLOAT))
    return queries, keys, decay, jnp.where(inside, finite(strength), 0.0)


def window_operands(q, k, decay, beta, window: int):
    """``X`` and ``C`` of a window, as the rows of ``u`` and those of ``o``.

    Returns:
      ``keys``, ``queries`` [T, K] and ``key_values``, ``query_values`` [T, T]: ``u = keys S^T + key_values v``,
      ``o = queries S^T + query_values v``.
    """
    tile = k.shape[0]
    token = token_index(tile)
    lower, attention = [None] * window, [None] * window
    between = jnp.ones_like(decay)  # row t: product of the decays of i+1 .. t, for the i of the loop
    for i in reversed(range(window)):
        if i + 1 < window:
            between = jnp.where(token > i, between * row(decay, i + 1), between)
        carried = row(k, i) * between
        lower[i] = jnp.where(token > i, beta * jnp.sum(k * carried, axis=1, keepdims=True), 0.0)
        attention[i] = jnp.where(token >= i, jnp.sum(q * carried, axis=1, keepdims=True), 0.0)
    prefix = between * row(decay, 0)
    column = jax.lax.broadcasted_iota(jnp.int32, (tile, tile), 1)
    keys, queries = -beta * (prefix * k), prefix * q
    key_values, query_values = jnp.where(token == column, beta, 0.0), jnp.zeros((tile, tile), FLOAT)
    for i in range(window):  # forward substitution: row i is final when its turn comes
        key, value = row(keys, i), row(key_values, i)
        queries, query_values = queries + attention[i] * key, query_values + attention[i] * value
        if i + 1 < window:
            keys, key_values = keys - lower[i] * key, key_values - lower[i] * value
    return keys, queries, key_values, query_values


def commit_inputs(key, raw_gate, bias, rate, lower_bound, length):
    """Keys and decays [T, K] of the records that are folded; the others leave a state alone."""
    inside = token_index(key.shape[0]) < length
    keys = jnp.where(inside, normalized(key), 0.0)
    return keys, jnp.where(inside, token_decay(raw_gate, bias, rate, lower_bound), 1.0)


def commit_operands(k, decay, window: int):
    """``S_n = S_0 * total + sum over t of u_t keys_t^T``: keys [T, K] decayed by later tokens, total [1, K]."""
    token = token_index(k.shape[0])
    after = jnp.ones_like(decay)
    for j in reversed(range(1, window)):
        after = jnp.where(token < j, after * row(decay, j), after)
    return k * after, row(after, 0) * row(decay, 0)


def decode(state, q, k, v, decay, beta):
    """One token: state [V, K], q, k, decay [1, K], v, beta [V, 1] or [1, 1] -> state, output [V, 1].

    The decayed state is not formed to be read: ``(S a) k = S (a k)``, and ``(S a + u k^T) q = S (a q) + u (k . q)``.
    """
    seen = jnp.sum(state * (k * decay), axis=1, keepdims=True)
    read = jnp.sum(state * (q * decay), axis=1, keepdims=True)
    correction = beta * (v - seen)
    output = read + correction * jnp.sum(q * k, axis=1, keepdims=True)
    return state * decay + correction * k, output


def convolve(rows, taps, tokens: int):
    """``silu(sum over j of taps[j] rows[t + j])`` for each token: lists of fp32 rows, history first."""
    for t in range(tokens):
        y = sum(tap * x for tap, x in zip(taps[1:], rows[t + 1 :], strict=False)) + taps[0] * rows[t]
        yield y / (1.0 + jnp.exp(-y))
