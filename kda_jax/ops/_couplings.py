"""Couplings between the tokens of a block, safe at any decay.

For tokens ``j < i`` of a block of ``n``, ``D_ij = exp(sum of g over rows j+1..i)``. Take the highest bit in which ``i``
and ``j`` differ: it names a pair of neighbouring blocks with ``j`` in the left and ``i`` in the right one, and
``D_ij = exp(sum over the right block up to i) * exp(sum over the left block after j)``. Both exponents are sums of
non-positive numbers over exactly their own rows: nothing overflows, nothing cancels, every level is a matrix product.
The inverse of ``I + diag(beta) A`` is built by the same levels (block forward substitution), so no intermediate grows.
"""

import typing

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST


class Couplings(typing.NamedTuple):
    """All fp32; ``n`` tokens of a block."""

    attention: jax.Array  # [..., n, n]: q_i . k_j D_ij for i >= j, else 0
    inverse: jax.Array  # [..., n, n]: (I + L)^-1 with L_ij = beta_i k_i . k_j D_ij for i > j
    prefix: jax.Array  # [..., n, K]: sum of g over rows 0..i
    suffix: jax.Array  # [..., n, K]: sum of g over rows i+1..n-1
    total: jax.Array  # [..., K]: sum of g over the block


def block_couplings(q, k, log_decay, beta) -> Couplings:
    """Couplings of each block: ``q``, ``k``, ``log_decay`` [..., n, K], ``beta`` [..., n], fp32; ``n`` is 2^i."""
    *lead, n, K = k.shape
    # one batch axis: XLA's CPU library calls crash on the ranks that several would lead to (jaxlib 0.10)
    q, k, log_decay, beta = (x.reshape(-1, *x.shape[len(lead) :]) for x in (q, k, log_decay, beta))
    batch = k.shape[:1]
    prefix, suffix, total = log_decay, jnp.zeros_like(log_decay), log_decay
    attention = jnp.sum(q * k, axis=-1)[..., None, None]
    inverse = jnp.ones((*batch, n, 1, 1), jnp.float32)
    size = 1
    while size < n:
        pairs = n // (2 * size)

        def halves(x, pairs=pairs, size=size):
            x = x.reshape(*batch, pairs, 2, size, *x.shape[len(batch) + 1 :])
            return x[..., 0, :, :], x[..., 1, :, :]

        prefix_l, prefix_r = halves(prefix)
        suffix_l, suffix_r = halves(suffix)
        total_l, total_r = total[..., 0::2, None, :], total[..., 1::2, None, :]
        left, right = jnp.exp(prefix_r), jnp.exp(suffix_l)
        keys = halves(k)[0] * right
        attention_off = _outer(halves(q)[1] * left, keys)
        lower = halves(beta[..., None])[1] * _outer(halves(k)[1] * left, keys)
        inverse_l, inverse_r = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        inverse_off = -_matmul(inverse_r, _matmul(lower, inverse_l))
        attention = _lower_block(attention[..., 0::2, :, :], attention_off, attention[..., 1::2, :, :])
        inverse = _lower_block(inverse_l, inverse_off, inverse_r)
        prefix = jnp.concatenate([prefix_l, total_l + prefix_r], axis=-2).reshape(*batch, n, K)
        suffix = jnp.concatenate([suffix_l + total_r, suffix_r], axis=-2).reshape(*batch, n, K)
        total = (total_l + total_r)[..., 0, :]
        size *= 2
    found = Couplings(attention[..., 0, :, :], inverse[..., 0, :, :], prefix, suffix, total[..., 0, :])
    return Couplings(*(x.reshape(*lead, *x.shape[1:]) for x in found))


def next_power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _matmul(a, b):
    if a.shape[-1] <= 4:  # far below a matrix unit's tile: a fused multiply-and-add is faster everywhere
        return jnp.sum(a[..., :, :, None] * b[..., None, :, :], axis=-2)
    return jnp.matmul(a, b, precision=HIGHEST)


def _outer(a, b):
    """[..., s, K], [..., s, K] -> [..., s, s], contracting K."""
    if a.shape[-2] <= 4:
        return jnp.sum(a[..., :, None, :] * b[..., None, :, :], axis=-1)
    return jnp.einsum("...ik,...jk->...ij", a, b, precision=HIGHEST)


def _lower_block(top, off, bottom):
    """[[top, 0], [off, bottom]] of [..., s, s] blocks."""
    upper = jnp.concatenate([top, jnp.zeros_like(top)], axis=-1)
    lower = jnp.concatenate([off, bottom], axis=-1)
    return jnp.concatenate([upper, lower], axis=-2)
